"""The table rows of `farfield measure`: the operators on this machine, beside each other or beside its limits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from farfield.cli.output import Row, joined, megabytes_finely
from farfield.cli.printed import table_for
from farfield.cli.values import AttentionOptions
from farfield.cost import roofline, saved_bytes
from farfield.cost.measuring import device_name, step, take_turns
from farfield.cost.planning import Setting, needs
from farfield.nn import GridAttention
from farfield.nn.devices import free_bytes
from farfield.ops import OPERATORS, Operator

# Two outputs are equal up to float32 rounding if they differ by this share of their norm at most.
_SAME = 1e-4
_ROOFLINE = "bytes macs copy_rate product_rate bottleneck least_seconds seconds times"
# The seconds that a grid takes are estimated if an operator has at least so many MACs, and stated from so many on.
MANY_MACS, LONG = 10**10, 60


@dataclass(frozen=True)
class Measurements:
    """What is measured: operators, by name, on random grids of some sizes, or of the papers' (None)."""

    attention: AttentionOptions
    operators: dict[str, str | Operator]
    sizes: Sequence[tuple[int, ...]] | None
    repeats: int
    backward: bool
    device: str

    def measure_all(self) -> list[Row]:
        """Measure each operator on each grid; softmax, if selected, is first: the others are compared with it."""
        return [row for grid, fit in self._grids() for row in self._measure_grid(grid, fit)]

    def measure_rooflines(self) -> list[Row]:
        """Measure each operator on each grid beside the least time that this machine could take."""
        rows: list[Row] = []
        for grid, fit in self._grids():
            for name in fit:
                result = roofline(self._build(name), grid, backward=self.backward, repeats=self.repeats)
                row = {"size": list(grid.shape[2:]), "operator": name}
                row |= {field: getattr(result, field) for field in _ROOFLINE.split()}
                rows.append(row | {"device": device_name(grid.device)})
        return rows

    def _grids(self) -> Iterator[tuple[torch.Tensor, list[str]]]:
        """Yield a random grid of each size and the operators that fit into the free memory; raise if none ever does."""
        names, none = sorted(self.operators, key=lambda name: name != "softmax"), True
        for size in self.sizes or [(14, 14), (28, 28), (56, 56)]:
            # A user's own operator has no formula, so neither its memory nor its time is known before.
            own = [name for name in names if name not in OPERATORS]
            fit = self._those_that_fit([self._setting(name, size) for name in names if name in OPERATORS])
            if fit or own:
                none = False
                self._warn_of_minutes(fit)
                torch.manual_seed(0)
                shape = (self.attention.batch, self.attention.channels, *size)
                grid = torch.randn(shape, device=self.device, requires_grad=self.backward)
                yield grid, [setting.operator for setting in fit] + own
        if none:
            raise ValueError(
                "farfield measure: no operator fits into the free memory; fix: a smaller --size or --batch."
            )

    def _setting(self, name: str, size: tuple[int, ...]) -> Setting:
        channels, batch, heads, project = self.attention
        return Setting(name, channels, heads, OPERATORS[name].projections(project), batch, size)

    def _those_that_fit(self, settings: list[Setting]) -> list[Setting]:
        free, fit = free_bytes(torch.device(self.device)), []
        for setting, need in zip(settings, needs(settings, training=self.backward, device=None), strict=True):
            if need.bytes <= free:
                fit.append(setting)
            else:
                warnings.warn(
                    f"farfield measure: {setting.operator} on {joined(list(setting.size))} positions, batch "
                    f"{setting.batch}, needs {megabytes_finely(need.bytes)} of memory, and {megabytes_finely(free)} "
                    "are free: it is left out; fix: a smaller --size or --batch.",
                    stacklevel=2,
                )
        return fit

    def _warn_of_minutes(self, settings: list[Setting]) -> None:
        if max((setting.cost().macs for setting in settings), default=0) < MANY_MACS or not settings:
            return
        # A turn has a pass that is not timed; before the turns there are two, and one each for memory and the response.
        passes = 2 * self.repeats + 4
        estimates = needs(settings, training=self.backward, device=self.device)
        seconds = {
            setting.operator: passes * (each.seconds or 0) for setting, each in zip(settings, estimates, strict=True)
        }
        total, longest = sum(seconds.values()), max(seconds, key=lambda name: seconds[name])
        if total >= LONG:
            warnings.warn(
                f"farfield measure: {joined(list(settings[0].size))} positions, batch {self.attention.batch}, take "
                f"about {total / 60:,.1f} minutes or more, {longest} {seconds[longest] / total:.0%} of them; fix: "
                "fewer --repeats, or an --operator for each that matters.",
                stacklevel=2,
            )

    def _measure_grid(self, grid: torch.Tensor, names: list[str]) -> list[Row]:
        channels, batch, heads, project = self.attention
        table = table_for(tuple(grid.shape[2:]), channels, batch=batch, heads=heads, project=project)
        attentions = {name: self._build(name) for name in names}
        runs = {name: step(attention, [grid], self.backward) for name, attention in attentions.items()}
        times = take_turns({"copy": step(torch.clone, [grid], False), **runs}, grid.device, self.repeats)
        copy, reference = times["copy"], times.get("softmax")
        rows: list[Row] = []
        outputs: dict[str, torch.Tensor] = {}
        for name, attention in attentions.items():
            with torch.no_grad():
                output = attention(grid)
            measured, printed = times[name], table.rows.get(name) if table else None
            same = [other for other, known in outputs.items() if (output - known).norm() <= _SAME * known.norm()]
            rows.append(
                {
                    "size": list(grid.shape[2:]),
                    "operator": name,
                    "seconds": measured.seconds,
                    "fastest": measured.fastest,
                    "copies": measured.seconds / copy.seconds,
                    "speed_up": reference and reference.seconds / measured.seconds,
                    "speed_up_printed": printed and printed.speed_up,
                    "peak_bytes": measured.peak_bytes,
                    "memory_saving": reference and 1 - measured.peak_bytes / reference.peak_bytes,
                    "saved_bytes": saved_bytes(attention, grid) if self.backward else None,
                    "equals": ", ".join(same) or None,
                    "device": measured.device,
                }
            )
            outputs[name] = output
        return rows

    def _build(self, name: str) -> GridAttention:
        """Build the module of an operator; the same seed gives all of them the same projections."""
        torch.manual_seed(1)
        operator = self.operators[name]
        channels, _, heads, project = self.attention
        project = (OPERATORS[operator] if isinstance(operator, str) else operator).projections(project)
        return GridAttention(channels, operator, heads=heads, project=project).eval().to(self.device)
