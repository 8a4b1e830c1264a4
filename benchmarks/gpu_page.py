"""The Markdown page of the results of `gpu.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Result = dict[str, Any]
Entries = tuple[object, ...]


def page(result: Result) -> str:
    """Format every number with its hardware and the command that measured it; a small run has no times and bytes."""
    results = {step["name"]: step["result"] for step in result["steps"] if step["result"] is not None}
    whole, states = not result["small"], {step["name"]: step["state"] for step in result["steps"]}
    parts = ["# farfield on one device", *opening(result)]
    parts += ["## Steps", *table(("step", "", "seconds", "at most", "command"), map(step_entries, result["steps"]))]
    if "tests" in results:
        parts += ["## Tests", *tests(results["tests"], states["tests"] == "out of time")]
    if sections := [each for name, each in results.items() if name.startswith("limits ")]:
        parts += ["## Limits", *limits(sections, whole)]
    if "training steps" in results:
        parts += ["## Training steps", *training_steps(results["training steps"], whole)]
    if "tiles" in results:
        parts += ["## Networks in tiles", *tiles(results["tiles"], whole)]
    if "peers" in results:
        parts += ["## Operators and peers", *peers(results["peers"], whole)]
    for step in result["steps"]:
        if step["printed"]:
            parts += [f"## The end of what `{step['name']}` printed", "```", step["printed"], "```"]
    return "\n".join(part if part.startswith("|") or not part else f"{part}\n" for part in parts)


def table(headings: Entries, rows: Iterable[Entries]) -> Iterator[str]:
    """Yield the lines of a table, with a blank one after it."""
    yield line_of(headings)
    yield "|" + "---|" * len(headings)
    yield from map(line_of, rows)
    yield ""


def shown(headings: Entries, rows: Iterable[Entries], columns: int) -> tuple[Entries, Iterable[Entries]]:
    """Return the first columns of a table: the measured values are in the last ones."""
    return headings[:columns], (row[:columns] for row in rows)


def line_of(entries: Iterable[object]) -> str:
    """Format one line of a table; replace the characters that would end an entry or the line."""
    return f"| {' | '.join(' '.join(str(entry).replace('|', '/').split()) for entry in entries)} |"


def opening(result: Result) -> Iterator[str]:
    """Yield the command, the machine and the packages that it lacks."""
    small = "Everything is small here, to check that it runs: nothing is judged, and no measured values are shown. "
    size = small if result["small"] else ""
    yield f"{size}`{result['command']}`, {result['seconds']:.0f} seconds in all, of revision {result['revision']}."
    yield from table(("what", "value"), ((row["what"], row["value"]) for row in result["machine"]))
    for name, use in result["missing"].items():
        yield f"* The package `{name}` is missing, and with it {use}."


def step_entries(step: Result) -> tuple[object, ...]:
    """Return the entries of a step, with its state."""
    state = step["state"] if step["state"] == "passed" else f"**{step['state']}**"
    return step["name"], state, f"{step['seconds']:.0f}", f"{step['limit']:.0f}", f"`{step['command']}`"


def tests(result: Result, stopped: bool) -> Iterator[str]:
    """Yield the numbers of passed, failed and skipped tests, the reasons, and the failed tests."""
    rest = " Then their time was up: others did not run." if stopped else ""
    yield f"{result['passed']:,} passed, {result['failed']:,} failed, {result['skipped']:,} skipped.{rest}"
    if result["reasons"]:
        yield from table(("skipped", "because"), ((count, reason) for reason, count in result["reasons"].items()))
    if result["wrong"]:
        yield from table(("failed", "because"), ((f"`{each['test']}`", each["why"][:200]) for each in result["wrong"]))


def limits(sections: list[Result], whole: bool) -> Iterator[str]:
    """Yield the lines of `limits.py`; a line exists only if its contestants were right."""
    lines = [line for section in sections for line in section["lines"]]
    words = {None: "not judged", True: "met", False: "**not met**"}
    judged = [line["met"] for line in lines if line["met"] is not None]
    met = f"{sum(judged)} of {len(judged)} met" if judged else "None is judged"
    yield (
        f"{met}, on {sections[0]['hardware']}. The limits are for two CPU cores, except the shares of the bandwidth "
        "and of the matrix rate, which are for a GPU. Contestants that differ from their equation in float64 "
        "get no line."
    )
    headings = ("line", "limit", "measured", "")
    entries = ((line["what"], line["limit"], line["measured"], words[line["met"]]) for line in lines)
    yield from table(*shown(headings, entries, 4 if whole else 2))


def training_steps(result: Result, whole: bool) -> Iterator[str]:
    """Yield the table of training steps: forward, backward and SGD."""
    first = result["rows"][0]
    yield (
        f"Batch {first['batch']} of {first['side']}², channels last, medians of {first['repeats']} turns, on "
        f"{result['hardware']}; convolutions of float32 in torch's default precision, TF32 on a GPU; bfloat16 by "
        "autocast. Peak memory is beyond weights, gradients and momentum. Error: relative L2 distance of output and "
        "gradients in float64 from those on the CPU, checked before anything was timed."
    )
    headings = ("network", "dtype", "error", "median, ms", "fastest, ms", "peak, MB")
    yield from table(*shown(headings, map(training_entries, result["rows"]), 6 if whole else 3))


def training_entries(row: Result) -> tuple[object, ...]:
    """Return the entries of one network in one dtype."""
    times = (f"{1e3 * row[key]:,.2f}" for key in ("seconds", "fastest"))
    return f"`{row['name']}`", row["dtype"], f"{row['error']:.1e}", *times, f"{row['peak_bytes'] / 1e6:,.0f}"


def tiles(result: Result, whole: bool) -> Iterator[str]:
    """Yield the table of networks untiled and in tiles, and of the two steps of an attention."""
    yield (
        f"On {result['hardware']}. Off: largest difference to the network untiled in the same mode, relative to its "
        "largest number. Idle: share of the seconds in which no kernel runs; waits: of the processor for the device."
    )
    headings = ("network", "way", "TF32", "off", "seconds", "peak, MB", "idle", "waits")
    yield from table(*shown(headings, map(tile_entries, result["rows"]), 8 if whole else 4))


def tile_entries(row: Result) -> tuple[object, ...]:
    """Return the entries of one network in one way; one that does not fit has none."""
    what = row["network"], row["way"], "" if row["tf32"] is None else ("on" if row["tf32"] else "off")
    if row["seconds"] is None:
        return *what, "does not fit", "", "", "", ""
    off = "" if row["off"] is None else f"{row['off']:.0e}"
    gpu = () if row["peak"] is None else (f"{row['peak'] / 1e6:,.0f}", f"{row['idle']:.0%}", str(row["waits"]))
    return *what, off, f"{row['seconds']:,.3f}", *(gpu or ("", "", ""))


def peers(rows: list[Result], whole: bool) -> Iterator[str]:
    """Yield the table of operators, regular attention and other libraries."""
    first = rows[0]
    yield (
        f"{first['channels']} channels, batch {first['batch']}, heads {first['heads']}, {first['dtype']}; projections "
        f"`{first['project']}`, but all four for peers and their counterparts; on {first['hardware']}. Error: "
        "relative L2 distance from the equation in float64, checked before anything was timed. Copies: time divided by "
        "that of `x.clone()`; ÷ ours: time divided by that of farfield's operator of the same function, or the nearest."
    )
    headings = ("contestant", "size", "direction", "error", "median, ms", "copies", "÷ ours", "peak, MB")
    yield from table(*shown(headings, map(peer_entries, rows), 8 if whole else 4))


def peer_entries(row: Result) -> tuple[object, ...]:
    """Return the entries of one contestant on one grid; a wrong one has no time."""
    what = row["name"], "×".join(map(str, row["size"])), row["direction"]
    if not row["right"]:
        return *what, f"**wrong**, {row['error']:.1e}", "", "", "", ""
    ratio = f"{row['rival_times']:.2f}{'' if row['same'] else ' (another function)'}" if row["rival_times"] else ""
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.1f}"
    times = f"{1e3 * row['seconds']:,.3f}", f"{row['copies']:,.2f}"
    return *what, f"{row['error']:.1e}", *times, ratio, peak
