"""`farfield info` and `farfield kernels`: what farfield runs on, whether the CPU kernels run, and if not, why."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterable

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import farfield
from farfield._checks import install_command
from farfield.cli.output import Column, Row, Table
from farfield.cost.measuring import processor_name
from farfield.ops.fast import kernels, table

# Names in imports -> names of packages, where they differ.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "skimage": "scikit-image", "PIL": "Pillow", "yaml": "PyYAML"}
DISTRIBUTIONS |= {"bioimageio": "bioimageio.core"}


def show_machine() -> Table:
    """Show versions, devices, threads, installed extras and kernels."""
    # In the order that a bug report needs.
    rows = {
        "farfield": farfield.__version__,
        "Python": f"{sys.version.split()[0]}, {platform.platform()}",
        "torch": f"{torch.__version__}, {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPU'} build",
        "processor": f"{processor_name()}, {torch.get_num_threads()} threads of PyTorch",
        "devices": _devices(),
        **{f"extra {name}": text for name, text in extras().items()},
        "kernels": f"CPU: {_describe_state()}",
    }
    return _list_facts("farfield on this machine", rows.items())


def show_kernels() -> Table:
    """Show whether the CPU kernels run, their library, and the kernel table: what computes what, and when."""
    rows = {
        "state": _describe_state(),
        "library": str(kernels.LIBRARY),
        "grids": "float32, bfloat16 and float16 on a CPU, contiguous or channels-last",
        "blocks": _describe_blocks(),
        "switch": f"{kernels.SWITCH}=0 turns them off",
    }
    lines = [(", ".join(line.names) or "–", table.describe(line)) for line in table.LINES]
    return _list_facts("CPU kernels", [*rows.items(), *lines])


def _list_facts(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    rows: list[Row] = [{"what": what, "value": value} for what, value in facts]
    return Table(title, [Column("what", "", left=True), Column("value", "", left=True)], rows)


def _describe_state() -> str:
    return kernels.why_not() or f"run, compiled for {kernels.instructions()}"


def _describe_blocks() -> str:
    if not kernels.run():
        return "-"
    second, last = (size / 2**20 for size in kernels.cache_bytes())
    return f"a quarter or half of the level-2 cache, {second:g} MiB; written past the caches from {last / 2:g} MiB on"


def _devices() -> str:
    if torch.cuda.is_available():
        return ", ".join(
            f"cuda:{index} {torch.cuda.get_device_name(index)} "
            f"({torch.cuda.get_device_properties(index).total_memory / 2**30:.0f} GiB)"
            for index in range(torch.cuda.device_count())
        )
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return "no accelerator: the CPU only"


def extras() -> dict[str, str]:
    """Return, for each extra of the installed package, which of its packages are missing."""
    try:
        metadata = importlib.metadata.metadata("farfield")
    except importlib.metadata.PackageNotFoundError:
        return {}
    required = metadata.get_all("Requires-Dist") or []
    states: dict[str, str] = {}
    for extra in metadata.get_all("Provides-Extra") or []:
        missing = [name for name in packages(required, extra) if not installed(name)]
        states[extra] = f"lacks {', '.join(missing)}" if missing else "installed"
    return states


def install_fix(module: str, extra: str) -> str:
    """Return the pip command for a module that is missing: that of an extra of farfield, or of the package itself."""
    match = find_extra(module, extra)
    return install_command(match) if match else f"pip install {distribution_name(module)}"


def distribution_name(module: str) -> str:
    """Return the name of the package to install for a module, such as Pillow for PIL."""
    return DISTRIBUTIONS.get(module, module)


def find_extra(module: str, preferred: str = "") -> str | None:
    """Return the extra with the package of a module: the preferred one, else the smallest; None if no extra has it."""
    try:
        metadata = importlib.metadata.metadata("farfield")
    except importlib.metadata.PackageNotFoundError:
        return preferred or None
    required, name = metadata.get_all("Requires-Dist") or [], canonicalize_name(distribution_name(module))
    extras = sorted(metadata.get_all("Provides-Extra") or [], key=lambda extra: len(packages(required, extra)))
    return next((extra for extra in [preferred, *extras] if extra and name in packages(required, extra)), None)


def packages(required: list[str], extra: str) -> list[str]:
    """Return the packages of an extra, including those of the extras that it names."""
    names: list[str] = []
    for requirement in map(Requirement, required):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "farfield":
            names += [each for part in sorted(requirement.extras) for each in packages(required, part)]
        else:
            names.append(canonicalize_name(requirement.name))  # as the metadata have it or not: pillow, Pillow
    return list(dict.fromkeys(names))


def installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
