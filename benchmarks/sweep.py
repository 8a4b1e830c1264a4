"""Insert attention into networks of other libraries, or replace their attention; classify each result.

    python benchmarks/sweep.py --out sweep.jsonl
    python benchmarks/sweep.py --out sweep.jsonl --only 'timm/*' --limit 10
    python benchmarks/sweep.py --out sweep.jsonl --only timm/swinv2_cr_tiny_224 --place 'stages.*'

Each check of a network at a place is a line of JSON: the check, the verdict and the text. An interrupted run continues
after the last line. A check is a function in `CHECKS` from a network to its results.

- right: at first the output is unchanged, to the bit; it changes with the weights of the inserted module; the module
  can be removed. For replaced attention: the operator that it has, mostly softmax, leaves the output unchanged up to
  rounding, another operator does not.
- refused: farfield raises an error that names a fix, and the fix works; the network is unchanged.
- unclear: an error without a fix, or with one that does not work.
- untrue: an error with a false reason, such as "causal" for attention that attends to later positions.
- wrong: everything else.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from networks import Network, networks, timm_network

from farfield import insert, remove, replace_attention
from farfield.insertion._insert.record import Record, run_copy
from farfield.insertion._places import Place
from farfield.insertion._replace.finding import find_original
from farfield.nn import GridAttention
from farfield.nn.tracing import call

make = partial(GridAttention, operator="factorized_gaussian", inner_channels=8, project="qkvo", residual=True)
# The most parts and the most blocks of a network that are tried, and the seconds after which only blocks are tried.
PARTS, BLOCKS, LONGEST = 12, 3, 100
# The most fixes that are followed, one after the other.
FIXES = 4


class Result(NamedTuple):
    """The result of one check at one place."""

    place: str
    verdict: str
    text: str


# ---- places ----------------------------------------------------------------------------------------------------------
def propose_places(model: nn.Module, example: Any) -> list[str]:
    """Propose the places that a user would choose: the parts of the network, and some blocks, evenly spread."""
    paths = [path for path, module in model.named_modules() if path and any(True for _ in module.children())]
    record = Record(example)
    run_copy(model, example, paths, record.note)
    called = [path for path in paths if record.calls[path]]
    parts = [path for path in paths if path.count(".") == 0]
    blocks = [path for path in called if path not in parts]
    return spread(parts, PARTS) + spread(blocks, BLOCKS)


def spread(paths: list[str], number: int) -> list[str]:
    """Return some paths, evenly spread, or all if there are few."""
    step = max(1, len(paths) // number)
    return paths[step // 2 :: step][:number]


# ---- insert ----------------------------------------------------------------------------------------------------------
def check_insert(network: Network, where: list[str]) -> Iterator[Result]:
    """Insert at each given place, or at each proposed one."""
    torch.manual_seed(0)
    model = network.build().eval()
    # A branch whose last norm starts at zero would hide the effect of an addition in it.
    for weight in model.parameters():
        if not weight.any():
            nn.init.uniform_(weight, 0.5, 1)
    example, started = network.example(model), time.monotonic()
    places = where or propose_places(model, example)
    for place in places:
        if where or place in places[-BLOCKS:] or time.monotonic() - started < LONGEST:
            yield insert_at(model, place, example)


def insert_at(model: nn.Module, place: str, example: Any) -> Result:
    """Insert at one place, following the fixes that errors name, and check the result."""
    before, state = outputs(model, example), describe(model)
    tried: list[tuple[str, dict[str, Any]]] = [(place, {})]
    texts: list[str] = []
    while True:
        path, options = tried[-1]
        try:
            added = insert(model, path, make, example=example, **options)
        except Exception as error:  # noqa: BLE001
            texts.append(f"{path} {options or ''}: {type(error).__name__}: {error}")
            if describe(model) != state:
                return Result(place, "wrong", "\n".join([*texts, "this refusal leaves a trace"]))
            fix = read_fix(str(error), path, options)
            if fix is None:
                return Result(place, "refused" if "fix: " in str(error) else "unclear", "\n".join(texts))
            if fix in tried or len(tried) > FIXES:
                return Result(place, "unclear", "\n".join([*texts, "these fixes do not help"]))
            tried.append(fix)
        else:
            problem = check_added(model, added, example, before, state)
            verdict = "wrong" if problem else "right" if path == place else "refused"
            return Result(place, verdict, "\n".join([*texts, f"{path} {options or ''}: {problem or 'right'}"]))


def read_fix(text: str, path: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the place and the options that an error names as its fix, None if it names none explicitly."""
    fix = text.partition("fix: ")[2]
    layout = re.match(r'(?:choose one, )?layout="(\w+)"', fix)
    if layout:
        return path, {"layout": layout[1]}
    other = re.match(r'(?:insert at|choose an entry,) "([^"]+)"|insert at what runs: ([\w.]+\w)', fix)
    return (other[1] or other[2], {}) if other else None


def check_added(model: nn.Module, added: dict[str, nn.Module], example: Any, before: list[Tensor], state: Any) -> str:
    """Check an accepted addition and remove it; return what is wrong, empty if nothing."""
    problems, given = [], []
    for module in added.values():
        module.register_forward_hook(lambda module, inputs, grid: given.append(torch.equal(inputs[0], grid)))
    # With equal inputs a host may still run another kernel of torch: a batch of one has two memory layouts.
    if not equal(outputs(model, example), before) and not all(given):
        problems.append("not equal at first")
    for path, module in added.items():
        if not moves(model, path, module, example):
            problems.append("no effect")
    remove(model)
    if describe(model) != state or not equal(outputs(model, example), before):
        problems.append("remove does not restore")
    return ", ".join(problems)


def moves(model: nn.Module, path: str, module: nn.Module, example: Any) -> bool:
    """Whether the output of the network changes with the weights of an addition.

    A detector may drop the changed values: there it is enough if the output of another module changes.
    """
    place = path.partition("[")[0]
    names = [name for name, _ in model.named_modules() if not f"{place}.".startswith(f"{name}.")]
    watched = []
    if "detection" in type(model).__module__:
        watched = [name for name in names if place and not f"{name}.".startswith(f"{place}.")]
    before = list(look(model, example, watched))
    # Large, because networks with random weights may strongly attenuate inner values; and NaN, where the attenuated
    # values are too small for a float32.
    for number in (10, torch.nan):
        module.output.weight.data.normal_().mul_(number)
        if any(not equal(*both) for both in zip(before, look(model, example, watched), strict=True)):
            return True
    return False


def look(model: nn.Module, example: Any, paths: list[str]) -> Iterator[list[Tensor]]:
    """Yield the output tensors of the network, and those of the first call of some modules."""
    record = Record(example)
    yield tensors(run_copy(model, example, paths, record.note))
    yield from (tensors(record.places[Place(path)].value) for path in paths if Place(path) in record.places)


def describe(model: nn.Module) -> list[Any]:
    """List the modules and their hooks, which must be unchanged after a refusal or a removal."""
    return [
        (path, type(module), [len(hooks) for name, hooks in vars(module).items() if name.endswith("_hooks") and hooks])
        for path, module in model.named_modules()
    ]


def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """Return the output tensors of a network, with the same random numbers each time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return tensors(call(model, example))


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an output, in nested containers and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict | tuple | list):
        return [tensor for part in (value.values() if isinstance(value, dict) else value) for tensor in tensors(part)]
    return tensors(vars(value)) if hasattr(type(value), "__dataclass_fields__") else []


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two outputs are equal to the bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- replace ---------------------------------------------------------------------------------------------------------
# The tolerance for sums over tokens in another order, through a dozen layers in float32.
SAME = 1e-3
# The operator that replaced attention is tried with.
OTHER = "factorized_gaussian"


def check_replace(network: Network, where: list[str]) -> Iterator[Result]:
    """Replace all attention, or that at the given places, by its own operator, by another, and by its own again."""
    torch.manual_seed(0)
    model = network.build().eval()
    # Most models start with weights so small that attention is uniform and its response has no visible effect.
    for weight in (weight for weight in model.parameters() if weight.dim() > 1):
        nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    example = network.example(model)
    before, state = outputs(model, example), describe(model)
    if not before:
        yield Result("", "not run", "it returns no tensor for the example")
        return
    try:
        replaced = replace_attention(model, "softmax", where=where or None)
    except Exception as error:  # noqa: BLE001
        text = f"{type(error).__name__}: {error}"
        if describe(model) != state or not near(outputs(model, example), before):
            yield Result("", "wrong", f"{text}\nthis refusal leaves a trace")
        elif "is causal" in text and not is_causal(model, re.search(r": (\S+) \(", text)[1], example):
            yield Result("", "untrue", text)
        else:
            yield Result("", "refused" if "fix: " in text else "unclear", text)
        return
    text, called = f"{len(replaced)} replaced", []
    for module in replaced.values():
        module.register_forward_hook(lambda module, inputs, output: called.append(module))
    for operator, equal_to_before in (("its own", True), (OTHER, False), ("its own", True)):
        try:
            if equal_to_before:
                restore(model, replaced)
            else:
                replace_by_other(model, where)
            after = outputs(model, example)
        except Exception as error:  # noqa: BLE001
            verdict = "refused" if "fix: " in str(error) else "unclear"
            yield Result("", verdict, f"{text}\n{operator}: {type(error).__name__}: {error}")
            return
        if not called:
            yield Result("", "not run", f"{text}, none of which the example reaches")
            return
        if near(after, before) != equal_to_before:
            what = "is not what it was" if equal_to_before else "changes nothing"
            yield Result("", "wrong", f"{text}\n{operator} {what}")
            return
    yield Result("", "right", text)


def restore(model: nn.Module, replaced: dict[str, nn.Module]) -> None:
    """Replace each attention by the operator that its library computes."""
    paths = collections.defaultdict(list)
    for path, module in replaced.items():
        paths[find_original(module)].append(path)
    for operator, where in paths.items():
        replace_attention(model, operator, where=where)


def replace_by_other(model: nn.Module, where: list[str]) -> None:
    """Replace attention by another operator; where that is refused, by the one that the error names."""
    try:
        replace_attention(model, OTHER, where=where or None)
    except ValueError as error:
        named = re.search(r'fix: take (?:one of (\w+), |.*"(\w+)"\.$)', str(error))
        if named is None:
            raise
        replace_attention(model, named[1] or named[2], where=where or None)


def near(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two outputs are equal up to rounding."""
    return len(one) == len(other) and all(
        a.shape == b.shape and bool((a - b).abs().max() <= SAME * b.abs().max()) if a.is_floating_point() else True
        for a, b in zip(one, other, strict=True)
        if a.numel()
    )


def is_causal(model: nn.Module, path: str, example: Any) -> bool:
    """Whether the first position of an attention does not attend to the last, as it is called in the model."""
    called: list[Any] = []

    def record(module: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
        if not called:
            called.append((inputs, options))

    module = model.get_submodule(path)
    hook = module.register_forward_pre_hook(record, with_kwargs=True)
    outputs(model, example)
    hook.remove()
    if not called:
        return True  # the attention does not run, so the reason cannot be refuted
    inputs, options = called[0]
    first = inputs[0] if inputs else next(each for each in options.values() if isinstance(each, Tensor))
    other = first.clone()
    other[:, -1] += 1
    changed = [other, *inputs[1:]] if inputs else inputs
    changed_options = {name: other if each is first else each for name, each in options.items()}
    with torch.no_grad():
        one, two = module(*inputs, **options), module(*changed, **changed_options)
    return torch.equal(tensors(one)[0][:, 0], tensors(two)[0][:, 0])


# Arguments are a network and the places to try; without places, a check chooses them.
CHECKS: dict[str, Callable[[Network, list[str]], Iterator[Result]]] = {"insert": check_insert, "replace": check_replace}


# ---- the sweep -------------------------------------------------------------------------------------------------------
def sweep(chosen: list[Network], checks: list[str], where: list[str], out: Path, limit: int | None) -> None:
    """Run the checks of networks that are not in `out` yet; all lines of a check are written when it is done."""
    lines = read(out)
    # Without an incomplete last line.
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    done = {(line["network"], line["check"]) for line in lines}
    todo = [(network, name) for network in chosen for name in checks if name in network.checks]
    todo = [(network, name) for network, name in todo if (network.name, name) not in done]
    for network, name in todo[:limit]:
        started = time.monotonic()
        results = attempt(CHECKS[name], network, where)
        about = {"network": network.name, "check": name, "seconds": round(time.monotonic() - started, 1)}
        with out.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(about | result._asdict()) + "\n" for result in results))
        print(f"{network.name}: {name}: {', '.join(result.verdict for result in results)}", flush=True)


def attempt(
    check: Callable[[Network, list[str]], Iterator[Result]], network: Network, where: list[str]
) -> list[Result]:
    """Return the results of a check; "not run" if the network cannot be built, or run with its example."""
    results = []
    try:
        results.extend(check(network, where))
    except Exception as error:  # noqa: BLE001
        results.append(Result("", "not run", f"{type(error).__name__}: {error}"))
    return results or [Result("", "not run", "no place to try")]


def read(out: Path) -> list[dict[str, Any]]:
    """Read the lines of a sweep; an incomplete last line is skipped."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def summarize(lines: list[dict[str, Any]]) -> str:
    """Count the verdicts by check and library."""
    counts: dict[tuple[str, str], collections.Counter[str]] = {}
    for line in lines:
        counts.setdefault((line["check"], line["network"].partition("/")[0]), collections.Counter())[
            line["verdict"]
        ] += 1
    return "\n".join(
        f"{check} {library}: " + ", ".join(f"{count} {verdict}" for verdict, count in counter.most_common())
        for (check, library), counter in counts.items()
    )


def main() -> None:
    """Read the arguments, sweep, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON; a run continues after the last")
    parser.add_argument("--only", nargs="*", default=["*"], help="names of networks, with *; timm/NAME is any of timm")
    parser.add_argument(
        "--checks", nargs="*", choices=list(CHECKS), default=list(CHECKS), help="which checks; both by default"
    )
    parser.add_argument("--place", nargs="*", default=[], help="places to try, instead of the proposed ones")
    parser.add_argument("--limit", type=int, help="number of checks to run")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    # Small random weights lead to denormal numbers, on which processors are slow.
    torch.set_flush_denormal(True)
    known = list(networks())
    chosen = [network for network in known if any(fnmatch.fnmatch(network.name, form) for form in options.only)]
    names = {network.name for network in known}
    named = [name for name in options.only if name.startswith("timm/") and "*" not in name and name not in names]
    chosen += [timm_network(name.removeprefix("timm/")) for name in named]
    sweep(chosen, options.checks, options.place, options.out, options.limit)
    print(summarize(read(options.out)))


if __name__ == "__main__":
    main()
