"""Command lines of training, in this process."""

from __future__ import annotations

from typing import Any

from farfield_papers.cli.train import main


def words(command: str, **options: Any) -> list[str]:
    """Spell a command line; a dot in an option's name may be written __ here, and what is None is left out."""
    named = {name.replace("__", "."): value for name, value in options.items() if value is not None}
    # It is read in order: the configuration, then a class, then its arguments.
    pairs = sorted(named.items(), key=lambda pair: (pair[0] != "config", pair[0].count(".")))
    return [command, *(f"--{name}={value}" for name, value in pairs)]


def farfield(command: str, **options: Any) -> None:
    main(words(command, **options))
