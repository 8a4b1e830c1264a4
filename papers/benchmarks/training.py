"""Runs of `farfield fit`, each in a folder of its own, and their core minutes."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def fit(recipe: Path, folder: Path, options: Mapping[str, object], more: Sequence[str] = ()) -> None:
    """Run one `farfield fit`, or what is left of it, and record its core minutes.

    Args:
        recipe: The configuration.
        folder: The folder of the run; a run that was killed resumes from its last epoch.
        options: Name -> value; options with None are left out.
        more: Further arguments of the command line.
    """
    command = [sys.executable, "-m", "farfield", "fit", "--config", str(recipe), *more]
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
    """Return the core minutes of all finished subprocesses, without waiting times."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) / 60


def minutes(folder: Path) -> float:
    """Sum the core minutes of all parts of a run."""
    return sum(float(line) for line in (folder / "minutes").read_text().split())
