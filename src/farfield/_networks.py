"""Networks of other packages, which they offer by entry points: by their names, and as they are saved by training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

from torch import nn

from farfield._checks import install_papers
from farfield._refusals import refusal

GROUP = "farfield.networks"


class NetworkPackage(Protocol):
    """What an entry point of `farfield.networks` names: a module with these names, which loads nothing heavy.

    Attributes:
        BUILDERS: The name of a network -> the function that builds it, as `farfield places --network NAME` does.
        OPENERS: A kind of trained models -> what opens the file or folder of one for volumes, as an `OpenedModel`.
    """

    BUILDERS: Mapping[str, Callable[..., nn.Module]]
    OPENERS: Mapping[str, Callable[[Any], Any]]

    def load(self, source: str, network: str | None) -> nn.Module:
        """Load a trained network from a folder, a run, a checkpoint or a repository; `network` names its function."""


@cache
def packages() -> dict[str, NetworkPackage]:
    """Return what the installed packages offer, by the names of their entry points."""
    return {each.name: each.load() for each in sorted(entry_points(group=GROUP))}


def builders() -> dict[str, Callable[..., nn.Module]]:
    """Return the networks that are built by name."""
    return {name: build for package in packages().values() for name, build in package.BUILDERS.items()}


def load_network(source: str, network: str | None = None) -> nn.Module:
    """Load a trained network from its folder, run, checkpoint or repository by the first package there is."""
    package = next(iter(packages().values()), None)
    if package is None:
        raise refusal(RuntimeError, f"trained networks are loaded by farfield-papers; fix: {install_papers()}.")
    return package.load(source, network)
