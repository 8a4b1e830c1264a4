"""The Markdown page of what `gpu.py` found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Result = dict[str, Any]
Entries = tuple[object, ...]


def page(result: Result) -> str:
    """Every number with what it was measured on and the command that measured it; of a small run no times and bytes."""
    found = {step["name"]: step["found"] for step in result["steps"] if step["found"] is not None}
    whole, states = not result["small"], {step["name"]: step["state"] for step in result["steps"]}
    parts = ["# farfield on one device", *opening(result)]
    parts += ["## Steps", *table(("step", "", "seconds", "at most", "command"), map(step_entries, result["steps"]))]
    if "tests" in found:
        parts += ["## Tests", *tests(found["tests"], states["tests"] == "out of time")]
    if sections := [each for name, each in found.items() if name.startswith("limits ")]:
        parts += ["## Limits", *limits(sections, whole)]
    if "training steps" in found:
        parts += ["## Training steps", *training_steps(found["training steps"], whole)]
    if "peers" in found:
        parts += ["## Operators and peers", *peers(found["peers"], whole)]
    for step in result["steps"]:
        if step["printed"]:
            parts += [f"## The end of what `{step['name']}` printed", "```", step["printed"], "```"]
    return "\n".join(part if part.startswith("|") or not part else f"{part}\n" for part in parts)


def table(headings: Entries, rows: Iterable[Entries]) -> Iterator[str]:
    """Lines of a table, with a blank one after it."""
    yield line_of(headings)
    yield "|" + "---|" * len(headings)
    yield from map(line_of, rows)
    yield ""


def shown(headings: Entries, rows: Iterable[Entries], columns: int) -> tuple[Entries, Iterable[Entries]]:
    """The first columns of a table: what is measured stands in the last ones."""
    return headings[:columns], (row[:columns] for row in rows)


def line_of(entries: Iterable[object]) -> str:
    """One line of a table; what would end a entry or the line is written otherwise."""
    return f"| {' | '.join(' '.join(str(entry).replace('|', '/').split()) for entry in entries)} |"


def opening(result: Result) -> Iterator[str]:
    """The command, the machine and what is missing on it."""
    small = "Everything is small here, to see that it runs: nothing is judged, and what was measured is left out. "
    size = small if result["small"] else ""
    yield f"{size}`{result['command']}`, {result['seconds']:.0f} seconds in all, of revision {result['revision']}."
    yield from table(("what", "value"), ((row["what"], row["value"]) for row in result["machine"]))
    for name, use in result["missing"].items():
        yield f"* The package `{name}` is missing, and with it {use}."


def step_entries(step: Result) -> tuple[object, ...]:
    """A step and how it ended."""
    state = step["state"] if step["state"] == "passed" else f"**{step['state']}**"
    return step["name"], state, f"{step['seconds']:.0f}", f"{step['limit']:.0f}", f"`{step['command']}`"


def tests(found: Result, stopped: bool) -> Iterator[str]:
    """How many tests passed, failed and were skipped; why; which failed."""
    rest = " Then their time was up: others did not run." if stopped else ""
    yield f"{found['passed']:,} passed, {found['failed']:,} failed, {found['skipped']:,} skipped.{rest}"
    if found["reasons"]:
        yield from table(("skipped", "because"), ((count, reason) for reason, count in found["reasons"].items()))
    if found["wrong"]:
        yield from table(("failed", "because"), ((f"`{each['test']}`", each["why"][:200]) for each in found["wrong"]))


def limits(sections: list[Result], whole: bool) -> Iterator[str]:
    """The lines of `limits.py`; a line that was found is one whose contestants were right."""
    lines = [line for section in sections for line in section["lines"]]
    words = {None: "not judged", True: "met", False: "**not met**"}
    judged = [line["met"] for line in lines if line["met"] is not None]
    met = f"{sum(judged)} of {len(judged)} met" if judged else "None is judged"
    yield (
        f"{met}, on {sections[0]['hardware']}. The limits were set for two CPU cores, but for the shares of the "
        "bandwidth and of the matrix rate, which are for a GPU. Contestants that differ from their equation in float64 "
        "get no line."
    )
    headings = ("line", "limit", "measured", "")
    entries = ((line["what"], line["limit"], line["measured"], words[line["met"]]) for line in lines)
    yield from table(*shown(headings, entries, 4 if whole else 2))


def training_steps(found: Result, whole: bool) -> Iterator[str]:
    """Forward, backward and SGD."""
    first = found["rows"][0]
    yield (
        f"Batch {first['batch']} of {first['side']}², channels last, medians of {first['repeats']} turns, on "
        f"{found['hardware']}; convolutions of float32 as torch has them, on a GPU in TF32; bfloat16 by autocast. Peak "
        "memory is beyond weights, gradients and momentum. Error: relative L2 distance of output and gradients in "
        "float64 from those on the CPU, seen before anything was timed."
    )
    headings = ("network", "dtype", "error", "median, ms", "fastest, ms", "peak, MB")
    yield from table(*shown(headings, map(training_entries, found["rows"]), 6 if whole else 3))


def training_entries(row: Result) -> tuple[object, ...]:
    """One network in one dtype."""
    times = (f"{1e3 * row[key]:,.2f}" for key in ("seconds", "fastest"))
    return f"`{row['name']}`", row["dtype"], f"{row['error']:.1e}", *times, f"{row['peak_bytes'] / 1e6:,.0f}"


def peers(rows: list[Result], whole: bool) -> Iterator[str]:
    """Operators, regular attention and the libraries of others."""
    first = rows[0]
    yield (
        f"{first['channels']} channels, batch {first['batch']}, heads {first['heads']}, {first['dtype']}; projections "
        f"`{first['project']}`, but all four of peers and of what they are compared to; on {first['hardware']}. Error: "
        "relative L2 distance from the equation in float64, seen before anything was timed. Copies: how many times as "
        "long as `x.clone()`; ÷ ours: as our operator that is the same function, or the nearest."
    )
    headings = ("contestant", "size", "direction", "error", "median, ms", "copies", "÷ ours", "peak, MB")
    yield from table(*shown(headings, map(peer_entries, rows), 8 if whole else 4))


def peer_entries(row: Result) -> tuple[object, ...]:
    """One contestant on one grid; what is wrong has no time."""
    what = row["name"], "×".join(map(str, row["size"])), row["direction"]
    if not row["right"]:
        return *what, f"**wrong**, {row['error']:.1e}", "", "", "", ""
    ratio = f"{row['rival_times']:.2f}{'' if row['same'] else ' (another function)'}" if row["rival_times"] else ""
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.1f}"
    times = f"{1e3 * row['seconds']:,.3f}", f"{row['copies']:,.2f}"
    return *what, f"{row['error']:.1e}", *times, ratio, peak
