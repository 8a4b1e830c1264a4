"""Which networks of other libraries run in tiles: `python benchmarks/streamed_networks.py --sweep`.

Each network runs untiled and in tiles, cut along all axes, or, where that is refused, along fewer. The verdicts:

- right: the largest difference, relative to the largest number, is below 1e-4, or below 1e-6 in float64.
- refused: for one of the reasons in `REASONS`, which no tile could know better.
- could run: refused, for another reason.
- wrong: the difference is larger, or the check of a region before the first pass found one.
- crash: an error that is no refusal, or no end within `LIMIT` seconds of the processor.
- untiled: its library does not run it, or its result is constant, so that the table of networks is at fault.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from networks_of_diffusers import diffusers_networks
from networks_of_monai import monai_networks
from networks_of_others import Network, smp_networks, spandrel_networks, timm_networks, torchvision_networks
from networks_of_transformers import transformers_networks
from streamed_networks import settle, volume
from torch import Tensor, nn

from farfield.streaming import predict_whole
from farfield.streaming.check import TilesDifferError

# What a refusal says -> the reason. Operations stand there by the names that torch gives them.
REASONS = {
    "drawn numbers": r"draws random numbers",
    "matching": r"linear_sum_assignment",
    "NMS": r"\bnms\b|torchvision\.",
    "sorting over all": r"aten\.(sort|argsort|topk|kthvalue|median|nanmedian|mode|unique)\b",
    "data-dependent shapes": r"computes a shape from numbers|reads a computed number in Python"
    r"|takes the positions where a condition holds",
}
RIGHT, RIGHT_IN_FLOAT64 = 1e-4, 1e-6
LIMIT = 240
# Of a layer's numbers to those that it reads, below which its weights are scaled.
_LEAST = 0.5
VERDICTS = ("right", "right, an axis whole", "refused", "could run", "wrong", "crash", "untiled")
# Name of the library, as it is imported -> its networks, and the distribution if that has another name.
LIBRARIES: dict[str, tuple[Callable[[], Iterator[tuple[str, Network]]], str]] = {
    "transformers": (transformers_networks, "transformers"),
    "torchvision": (torchvision_networks, "torchvision"),
    "diffusers": (diffusers_networks, "diffusers"),
    "monai": (monai_networks, "monai"),
    "segmentation_models_pytorch": (smp_networks, "segmentation-models-pytorch"),
    "spandrel": (spandrel_networks, "spandrel"),
    "timm": (timm_networks, "timm"),
}


def sweep(only: Sequence[str] | None, file: Path | None) -> None:
    """Judge the networks that the file does not have for the same versions, writing it after each; print the tables.

    `only` are names, or their beginnings.
    """
    known = read(file)
    for library, (networks, distribution) in LIBRARIES.items():
        try:
            importlib.import_module(library)
        except ImportError:
            print(f"{library} is not installed, so its networks are left out.", flush=True)
            continue
        versions = {
            name: importlib.metadata.version(name) for name in dict.fromkeys(("farfield", "torch", distribution))
        }
        for own, network in networks():
            name = f"{library}/{own}"
            if only and not name.startswith(tuple(only)):
                continue
            if known.get(name, {}).get("versions") == versions:
                continue
            result = known[name] = {"name": name, "versions": versions} | judge(network)
            print(f"{name}: {summarize(result)}", flush=True)
            if file is not None:
                new = file.with_name(f"{file.name}.new")
                new.write_text("".join(f"{json.dumps(each)}\n" for each in known.values()), encoding="utf-8")
                os.replace(new, file)
    print_tables(list(known.values()))


def read(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return what a record has, by the name of the network."""
    if file is None or not file.exists():
        return {}
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {line["name"]: line for line in lines}


def judge(network: Network) -> dict[str, Any]:
    """Run one network untiled and in tiles, and say what came of it."""
    start = time.process_time()
    # Of the processor, which other programs may use too.
    signal.signal(signal.SIGVTALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT)
    try:
        result = _judge(network)
    except Exception as error:  # noqa: BLE001  (what is not a refusal is what is looked for)
        result = {"verdict": "crash", "text": f"{type(error).__name__}: {error}"[:600], "at": _place_of(error)}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return result | {"seconds": round(time.process_time() - start, 1)}


def _judge(network: Network) -> dict[str, Any]:
    torch.manual_seed(0)
    grid = volume(network.shape)
    try:
        net = strengthen(settle(network.build()))
        with torch.no_grad():
            # Some networks write to what they are given.
            expected = net(grid[None].clone())
            if not all(bool(each.isfinite().all()) for each in leaves(expected)):
                net = settle(network.build())
                expected = net(grid[None].clone())
    except Exception as error:  # noqa: BLE001  (of the library)
        return {"verdict": "untiled", "text": f"{type(error).__name__}: {error}"[:600], "at": _place_of(error)}
    if all(_is_constant(each) for each in leaves(expected)):
        return {"verdict": "untiled", "text": "its result is one number everywhere, which shows nothing"}
    refused = ""
    for tile in tiles(network.tile):
        try:
            result = predict_whole(net, grid, tile=tile, reduce=network.reduce, quiet=True)
        except TilesDifferError as error:
            return {"verdict": "wrong", "tile": tile, "text": str(error)[:600]}
        except Exception as error:
            if not is_refusal(error):
                raise
            refused = refused or str(error)
            # Only the rule of an operation, "aten.sort.default in layer: …", depends on which axes are cut.
            if not re.search(r"does not run in tiles: \S+ in \S+: ", str(error)):
                break
            continue
        return _compare(network, net, grid, (tile, result, expected), refused)
    reason = reason_of(refused)
    return {"verdict": "refused" if reason else "could run", "reason": reason, "text": refused[:600]}


def strengthen(net: nn.Module) -> nn.Module:
    """Scale weights that are small at the start, as those of transformers are, so that each layer shows in the result.

    A layer then has numbers as large as those that it reads.
    """
    with torch.no_grad():
        for weight in net.parameters():
            if weight.dim() > 1 and weight.is_floating_point():
                size = float(weight.std()) * weight[0].numel() ** 0.5
                if 0 < size < _LEAST:
                    weight.mul_(1 / size)
    return net


def _compare(network: Network, net: Any, grid: Tensor, run: tuple[Any, Any, Any], refused: str) -> dict[str, Any]:
    """Compare a result with that of the whole, in float64 if it is not near enough."""
    tile, result, expected = run
    off, precision, bound = difference(result, expected, network.reduce), "float32", RIGHT
    if not off < bound:
        net, grid, precision, bound = net.double(), grid.double(), "float64", RIGHT_IN_FLOAT64
        with torch.no_grad():
            expected = net(grid[None].clone())
        result = predict_whole(net, grid, tile=tile, reduce=network.reduce, quiet=True)
        off = difference(result, expected, network.reduce)
    right = "right" if tile == network.tile else "right, an axis whole"
    text = {"text": refused[:600]} if refused else {}
    return {"verdict": right if off < bound else "wrong", "tile": tile, "off": off, "precision": precision, **text}


def tiles(tile: tuple[int, ...]) -> Iterator[tuple[int | None, ...]]:
    """Yield a tile cut along all axes, then along all but one, and so on."""
    for whole in range(len(tile)):
        for axes in itertools.combinations(range(len(tile)), whole):
            yield tuple(None if axis in axes else length for axis, length in enumerate(tile))


def is_refusal(error: Exception) -> bool:
    """Whether an error says what is wrong by the name of the function that was called; torch's asserts do not."""
    text = str(error)
    return text.startswith(("predict_whole: ", "plan_whole: ")) and "INTERNAL ASSERT" not in text


def reason_of(text: str) -> str:
    """Return the reason of a refusal, or nothing where the network could run."""
    return next((reason for reason, pattern in REASONS.items() if re.search(pattern, text)), "")


def difference(result: Any, expected: Any, reduce: Any) -> float:
    """Return the largest difference of any grid, relative to the largest number of the whole."""
    if isinstance(reduce, Mapping):
        (key,) = reduce
        expected = expected[key]
    pairs = zip(leaves(result), leaves(expected), strict=True)
    return max(_off(own, want[0]) for own, want in pairs)


def _off(own: Tensor, want: Tensor) -> float:
    own, want = own.reshape(want.shape).double(), want.double()
    scale = float(want.abs().max()) or 1.0
    return float((own - want).abs().max()) / scale


def _is_constant(grid: Tensor) -> bool:
    return grid.numel() > 1 and bool((grid == grid.flatten()[0]).all())


def leaves(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, in order."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for each in output.values() for tensor in leaves(each))
    elif isinstance(output, tuple | list):
        yield from (tensor for each in output for tensor in leaves(each))


def _place_of(error: BaseException) -> str:
    """Return the file and line that raised, and the last ones of farfield."""
    places, trace = [], error.__traceback__
    while trace is not None:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " ".join(places[-4:])


def _raise_timeout(*_: Any) -> None:
    raise TimeoutError(f"no end within {LIMIT} s of the processor")


def summarize(result: Mapping[str, Any]) -> str:
    """Return a verdict with what belongs to it, in one line."""
    parts = [result["verdict"], result.get("reason", "")]
    if "off" in result:
        parts.append(f"{result['off']:.0e} in {result['precision']}, tile {tuple(result['tile'])}")
    if result.get("text"):
        parts.append(" ".join(result["text"].split())[:300])
    return "; ".join(filter(None, [*parts, f"{result['seconds']} s"]))


def print_tables(results: Sequence[Mapping[str, Any]]) -> None:
    """Print how many of each library have which verdict, and what is not right in all axes, by verdict and reason."""
    counts: dict[str, Counter[str]] = {}
    others: dict[tuple[str, str], list[str]] = {}
    for each in sorted(results, key=lambda each: VERDICTS.index(each["verdict"])):
        library, _ = each["name"].split("/")
        title = f"{library} {list(each['versions'].values())[-1]}"
        counts.setdefault(title, Counter())[each["verdict"]] += 1
        if each["verdict"] != "right":
            others.setdefault((verdict_of(each), why(each)), []).append(each["name"])
    counts["all"] = sum(counts.values(), Counter())
    shown = [verdict for verdict in VERDICTS if counts["all"][verdict] or verdict in ("wrong", "crash")]
    print(f"\n| library | networks | {' | '.join(shown)} |\n|---|---{'|---' * len(shown)}|")
    for title, own in counts.items():
        print(f"| {title} | {own.total()} | {' | '.join(str(own[verdict]) for verdict in shown)} |")
    print("\n| verdict | why | networks |\n|---|---|---|")
    for (verdict, reason), names in others.items():
        print(f"| {verdict} | {reason} | {list_names(names)} |")


def list_names(names: Sequence[str]) -> str:
    """Return names with their library once."""
    libraries: dict[str, list[str]] = {}
    for library, own in (name.split("/") for name in names):
        libraries.setdefault(library, []).append(own)
    return "; ".join(f"{library}: {', '.join(f'`{each}`' for each in own)}" for library, own in libraries.items())


def verdict_of(result: Mapping[str, Any]) -> str:
    """Return the verdict, with the reason or the axes that stay whole."""
    if result.get("reason"):
        return f"refused: {result['reason']}"
    if result["verdict"] == "right, an axis whole":
        return f"right with tile=({', '.join('None' if each is None else 'n' for each in result['tile'])})"
    return str(result["verdict"])


def why(result: Mapping[str, Any]) -> str:
    """Return what the error says, without the function, the module and the fix."""
    text = " ".join(result.get("text", "").split()).split("; fix:")[0].split(" fix:")[0]
    text = re.sub(r"^(predict_whole|plan_whole): \w+ (does not run in tiles: )?", "", text)
    text = re.sub(r"^(\S+) in \S+: ", r"`\1`: ", text)
    text = re.sub(r"^[\w.]+ (computes|draws|reads)", r"it \1", text)
    text = text or f"off by {result.get('off', float('nan')):.0e} in {result.get('precision', '')}"
    return text.replace("|", "\\|")[:240]
