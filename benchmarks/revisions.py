"""Compare this tree with a git revision: a benchmark on both, each in its own processes, in turns.

    python benchmarks/revisions.py HEAD~1 operators.py --operator siamese --only-ours --backward
    python benchmarks/revisions.py v0.1.0 limits.py --turns 9 --section kan

Each revision is measured by its own benchmark, which must have these options and `--json`; an option or a key that had
another name then is given with `--renamed size=sides`. A value is the median of the turns.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "benchmarks")
# What identifies a value in the file of a benchmark, and the values: seconds, bytes, and the value of a line of limits.
KEYS = ("size", "section", "direction", "name", "what")
VALUES = ("seconds", "saved_bytes", "peak_bytes", "measured")
Values = dict[str, float]


def unpack(revision: str, folder: Path) -> Path:
    """Extract the sources and the benchmarks of a revision."""
    command = ["git", "archive", "--format=zip", revision, *FOLDERS]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(f"revisions.py: git knows no revision {revision!r}: {archive.stderr.decode().strip()}")
    with zipfile.ZipFile(io.BytesIO(archive.stdout)) as files:
        files.extractall(folder)
    return folder


def run(root: Path, script: str, options: list[str], names: dict[str, str], file: Path) -> Values:
    """Run a tree's benchmark with the tree's own sources, and read the values that it writes; `names`: new to old."""
    file.unlink(missing_ok=True)
    options = [f"--{names[option[2:]]}" if option[2:] in names else option for option in options]
    command = [sys.executable, str(root / "benchmarks" / script), *options, "--json", str(file)]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if not file.exists():
        raise SystemExit(f"revisions.py: {script} failed in {root}:\n{done.stderr}")
    new_names = {old: new for new, old in names.items()}
    text = file.read_text(encoding="utf-8")
    sources = re.findall(r'"source": "([^"]+)"', text)
    if wrong := [source for source in sources if not Path(source).is_relative_to((root / "src").resolve())]:
        raise SystemExit(f"revisions.py: it should have measured {root / 'src'}, and measured {wrong[0]}.")
    return values_of(json.loads(text, object_pairs_hook=lambda row: {new_names.get(key, key): of for key, of in row}))


def values_of(result: list[dict[str, Any]] | dict[str, Any]) -> Values:
    """Return the values of a benchmark's file, by what was measured; of a text, its first number."""
    rows = result if isinstance(result, list) else result.get("rows") or result["lines"]
    values: Values = {}
    for row in rows:
        size = "×".join(map(str, row.get("size") or []))
        name = ", ".join(filter(None, [size, *(str(row[key]) for key in KEYS[1:] if row.get(key))]))
        for value in VALUES:
            if row.get(value):
                values[f"{name}: {value}"] = float(re.findall(r"[\d.e+-]+", str(row[value]).replace(",", ""))[0])
    return values


def compare(before: list[Values], now: list[Values]) -> list[tuple[str, float, float]]:
    """Return the medians over the turns of each value that all turns of both trees have."""
    shared = set.intersection(*(set(turn) for turn in (*before, *now)))
    names = [name for name in now[0] if name in shared]
    return [(name, *(statistics.median(turn[name] for turn in turns) for turns in (before, now))) for name in names]


def main() -> None:
    """Run both in turns, and print the medians and their ratio; with values that one tree does not have left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False  # of the benchmark's options
    parser.add_argument("revision", help="the git revision to compare this tree with")
    parser.add_argument("--turns", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("script", help="a benchmark's file, such as operators.py; its options follow")
    parser.add_argument("--renamed", action="append", default=[], metavar="NEW=OLD", help="a name at that revision")
    arguments, options = parser.parse_known_args()
    turns: dict[str, list[Values]] = {"before": [], "now": []}
    renamed = dict(names.split("=") for names in arguments.renamed)
    with tempfile.TemporaryDirectory() as folder:
        before = unpack(arguments.revision, Path(folder))
        for _ in range(arguments.turns):
            for label, root, names in (("before", before, renamed), ("now", ROOT, {})):
                turns[label].append(run(root, arguments.script, options, names, Path(folder) / "results.json"))
    rows = compare(turns["before"], turns["now"])
    print(f"| value | {arguments.revision} | this tree | this tree ÷ {arguments.revision} |\n|---|---|---|---|")
    for name, old, new in rows:
        print(f"| {name} | {old:.4g} | {new:.4g} | {new / old:.3f} |")
    left_out = {name for turn in (*turns["before"], *turns["now"]) for name in turn} - {name for name, *_ in rows}
    print(f"\nMedians of {arguments.turns} turns." + (f" Not in all of them: {sorted(left_out)}." if left_out else ""))


if __name__ == "__main__":
    main()
