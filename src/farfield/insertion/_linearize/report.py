"""What `linearize` returns: how well the linear network agrees with its teacher, layer by layer, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from farfield._checks import load_library
from farfield._refusals import door


class AttentionCost(NamedTuple):
    """Seconds and peak bytes of one layer's attention of so many tokens, without projections, before and after."""

    tokens: int
    seconds_before: float
    seconds: float
    bytes_before: int
    bytes: int


class LazyCosts(Sequence[AttentionCost]):
    """Costs that are measured when they are first read, as that takes seconds; a copy has the numbers alone."""

    def __init__(self, measure: Callable[[], Sequence[AttentionCost]]):
        self._measure = measure

    @cached_property
    def _costs(self) -> Sequence[AttentionCost]:
        return self._measure()

    def __getitem__(self, place: Any) -> Any:
        return self._costs[place]

    def __len__(self) -> int:
        return len(self._costs)

    def __repr__(self) -> str:
        return repr(self._costs)

    def __reduce__(self) -> Any:
        return tuple, (self._costs,)


@dataclass(frozen=True)
class LinearizeReport:
    """How well a linear network agrees with its teacher on an input that it was not trained on.

    Attributes:
        operator: The name of the operator.
        before: Mean cosine of the features of a token with the teacher's, before training.
        agreement: The same after training.
        error: Distance of the features from the teacher's after training, by their length.
        parts: The agreement without the local branch ("summary only") and without the summary ("local only").
        layers: Path of each attention -> the distance of the final features from the teacher's, by their length, where
            that attention alone is replaced, before training.
        kept: The paths of those that stayed softmax.
        steps: Training steps.
        losses: The training loss of each step, the squared distance by the squares; in steps of each attention alone
            the mean of theirs.
        seconds: Seconds of training.
        costs: Of one layer, at three lengths; measured when they are first read or printed.
        steps_alone: How many of the steps matched each attention alone, the first ones.
        best_step: After which step the network came nearest to the teacher, as it is now; 0 for the start.
    """

    operator: str
    before: float
    agreement: float
    error: float
    layers: Mapping[str, float]
    kept: tuple[str, ...] = ()
    steps: int = 0
    losses: tuple[float, ...] = field(default=(), repr=False)
    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    costs: Sequence[AttentionCost] = ()
    steps_alone: int = 0
    best_step: int = 0

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.operator}: cosine of final features with the teacher's {self.agreement:.3f} "
            f"({self.before:.3f} before {self.steps} steps, {self.steps_alone} of each attention alone, "
            f"of {self.seconds:.0f} s, the nearest after step {self.best_step}), distance {self.error:.2f}"
        )
        yield from (f"{name}: {cosine:.3f}" for name, cosine in self.parts.items())
        width = max(map(len, self.layers))
        yield f"{'layer':{width}}  distance where it alone is replaced, before training"
        for path, error in self.layers.items():
            yield f"{path:{width}}  {error:.3f}{'  stays softmax' if path in self.kept else ''}"
        if self.costs:
            yield "tokens   softmax s   linear s   softmax MiB   linear MiB   (attention of one layer)"
        for each in self.costs:
            yield (
                f"{each.tokens:6}{each.seconds_before:12.4f}{each.seconds:11.4f}"
                f"{each.bytes_before / 2**20:14.1f}{each.bytes / 2**20:13.1f}"
            )

    @door("LinearizeReport.plot")
    def plot(self, path: str | Path) -> None:
        """Draw the loss of each step, the error of each layer, and the seconds against the number of tokens.

        Args:
            path: A file of a format that matplotlib writes, such as .png.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        figure = load_library("matplotlib.figure", "plots", "it").Figure(figsize=(13, 3.6), layout="constrained")
        curve, bars, times = figure.subplots(1, 3)
        curve.plot(range(1, self.steps_alone + 1), self.losses[: self.steps_alone], label="each attention alone")
        curve.plot(range(self.steps_alone + 1, self.steps + 1), self.losses[self.steps_alone :], label="final features")
        curve.legend()
        curve.set(xlabel="step", ylabel="squared distance / squares", yscale="log", title="training")
        names = list(self.layers)
        colors = ["tab:grey" if name in self.kept else "tab:blue" for name in names]
        bars.barh(range(len(names)), list(self.layers.values()), color=colors)
        bars.set_yticks(range(len(names)), [_shorten(name) for name in names], fontsize=7)
        bars.invert_yaxis()
        bars.set(xlabel="distance of final features", title="each layer alone, before (grey: stays softmax)")
        tokens = [each.tokens for each in self.costs]
        times.plot(tokens, [each.seconds_before for each in self.costs], marker="o", label="softmax")
        times.plot(tokens, [each.seconds for each in self.costs], marker="o", label=self.operator)
        times.set(xlabel="tokens", ylabel="s", xscale="log", yscale="log", title="attention of one layer")
        times.legend()
        figure.savefig(path)


def _shorten(path: str) -> str:
    return path if len(path) < 28 else f"…{path[-27:]}"
