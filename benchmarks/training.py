"""Runs of `farfield fit`, each in a folder of its own, and the minutes that a core worked for them."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def fit(recipe: Path, folder: Path, options: Mapping[str, object], more: Sequence[str] = ()) -> None:
    """Run one `farfield fit`, or what is left of it, and note its minutes.

    Args:
        recipe: The configuration.
        folder: Of the run; one that was killed goes on from its last epoch.
        options: Name -> value, None leaves one out.
        more: Further words of the command line.
    """
    command = [sys.executable, "-m", "farfield.cli", "fit", "--config", str(recipe), *more]
    options = {**options, "trainer.default_root_dir": folder, "trainer.enable_progress_bar": "false"}
    if list(folder.glob("version_*/checkpoints/last.ckpt")):
        options["ckpt_path"] = "last"
    for name, value in options.items():
        if value is not None:
            command += [f"--{name}", str(value)]
    started = processor_minutes()
    try:
        subprocess.run(command, check=True)
    finally:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "minutes").open("a") as file:
            file.write(f"{processor_minutes() - started:.2f}\n")


def processor_minutes() -> float:
    """Minutes that a core has worked for the commands that are done: waiting does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 60


def minutes(folder: Path) -> float:
    """Add up the minutes of a run and of what it was resumed by."""
    return sum(float(line) for line in (folder / "minutes").read_text().split())
