"""Compare this tree with a git revision: the same benchmark on both, each in its own processes, in turns."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The keys that identify a result.
KEYS = ("size", "direction", "name")
# Files that measure seconds and bytes: this tree's are used for both.
RULER = ("measuring.py", "memory.py")


def against(arguments: argparse.Namespace) -> None:
    """Run the benchmark on this tree and on a revision, alternately, and show the ratio of the medians."""
    with tempfile.TemporaryDirectory() as folder:
        before = unpack(arguments.against, Path(folder))
        rounds: dict[str, list[list[dict]]] = {"before": [], "now": []}
        for _ in range(arguments.rounds):
            for label, source in (("before", before), ("now", ROOT / "src")):
                rounds[label].append(run(source, Path(folder) / "results.json"))
    rows = compared(rounds["before"], rounds["now"])
    show(rows, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


def unpack(revision: str, folder: Path) -> Path:
    """Extract the sources of a revision, with the measuring files of this tree."""
    archive = subprocess.run(
        ["git", "archive", "--format=zip", revision, "src"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        raise SystemExit(f"operators.py: git knows no revision {revision!r}: {archive.stderr.decode().strip()}")
    with zipfile.ZipFile(io.BytesIO(archive.stdout)) as files:
        files.extractall(folder)
    source = folder / "src"
    for name in RULER:
        shutil.copy(ROOT / "src" / "farfield" / "cost" / name, source / "farfield" / "cost" / name)
    return source


def run(source: Path, file: Path) -> list[dict]:
    """Run one process of the benchmark with these sources; wrong results have no time."""
    file.unlink(missing_ok=True)
    options = without(sys.argv[1:], ("--against", "--json", "--picture", "--rounds"))
    command = [sys.executable, str(Path(__file__).with_name("operators.py")), *options]
    command += ["--only-ours", "--quiet", "--json", str(file)]
    environment = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not file.exists():
        raise SystemExit(f"operators.py: the benchmark failed on {source}:\n{done.stderr}")
    rows = json.loads(file.read_text(encoding="utf-8"))
    if rows and not Path(rows[0]["source"]).is_relative_to(source.resolve()):
        raise SystemExit(f"operators.py: it should have measured {source}, and measured {rows[0]['source']}.")
    return rows


def without(arguments: list[str], options: tuple[str, ...]) -> list[str]:
    """Return a command line without some options and their values."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        named = argument.split("=")[0] in options
        if not named and not skip:
            kept.append(argument)
        skip = named and "=" not in argument
    return kept


def compared(before: list[list[dict]], now: list[list[dict]]) -> list[dict]:
    """Return the medians of the rounds, and the time of the revision divided by that of this tree."""
    rows = []
    for row in now[0]:
        key = [row[name] for name in KEYS]
        medians = [median(each, key, "seconds") for each in (before, now)]
        saved = [median(each, key, "saved_bytes") for each in (before, now)]
        ratio = medians[0] / medians[1] if all(medians) else None
        rows.append(
            {name: row[name] for name in (*KEYS, "hardware")}
            | {"seconds_before": medians[0], "seconds_now": medians[1], "times_as_fast": ratio}
            | {"saved_bytes_before": saved[0], "saved_bytes_now": saved[1]}
        )
    return rows


def median(rounds: list[list[dict]], key: list[object], name: str) -> float | None:
    """Return the median of a value over the rounds that have it."""
    values = [row[name] for rows in rounds for row in rows if [row[each] for each in KEYS] == key and row[name]]
    return statistics.median(values) if values else None


def show(rows: list[dict], arguments: argparse.Namespace) -> None:
    """Print both times and their ratio; above 1 this tree is faster."""
    from farfield.cli.output import Column, Table, joined, megabytes, milliseconds, write_table

    columns = [Column("size", "positions", joined, left=True), Column("direction", "", left=True)]
    columns += [Column("name", "", left=True), Column("seconds_before", arguments.against, milliseconds)]
    columns += [Column("seconds_now", "now", milliseconds), Column("times_as_fast", "times as fast", "{:.2f}".format)]
    columns += [
        Column("saved_bytes_before", "kept before", megabytes),
        Column("saved_bytes_now", "kept now", megabytes),
    ]
    write_table(Table(f"This tree and {arguments.against}, medians of {arguments.rounds} rounds", columns, rows))
    print(rows[0]["hardware"])
