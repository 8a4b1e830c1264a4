"""The table rows of `farfield info`: what farfield runs on."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import farfield
from farfield._checks import install_command
from farfield.cli import kernels
from farfield.cli.output import Row
from farfield.cost.measuring import processor_name

# Names in imports -> names of packages, where they differ.
DISTRIBUTIONS = {"sklearn": "scikit-learn", "skimage": "scikit-image", "PIL": "Pillow", "yaml": "PyYAML"}


def machine_rows() -> list[Row]:
    """Return versions, devices, extras and kernels, in the order that a bug report needs."""
    rows = {
        "farfield": farfield.__version__,
        "Python": f"{sys.version.split()[0]}, {platform.platform()}",
        "torch": f"{torch.__version__}, {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPU'} build",
        "processor": f"{processor_name()}, {torch.get_num_threads()} threads of PyTorch",
        "devices": _devices(),
        **{f"extra {name}": text for name, text in extras().items()},
        "kernels": f"CPU: {kernels.describe_state()}",
    }
    return [{"what": what, "value": value} for what, value in rows.items()]


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
    """Return whether a package is installed."""
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
