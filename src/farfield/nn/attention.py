"""One attention module for every operator, any rank, self and cross attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from farfield._checks import (
    check_grid,
    check_heads,
    check_mask,
    check_place,
    check_same_kind,
    projection_fix,
    shape_error,
    unknown,
)
from farfield.nn.norm import CoefficientNorm
from farfield.ops.grid import Gathered, accumulation, hide, in_layout_of
from farfield.ops.summary import Summary, autocasts, respond, split_heads, summarize
from farfield.ops.table import OPERATORS, Operator, softmax_of_products


class GridAttention(nn.Module):
    """Attend over a grid of any rank by any operator, with linear maps around it.

    `output(attention(query(X), key(Y), value(Y)))`, plus X if residual.

    Maps of values and outputs act on the summary and not on the grid (reduce first, project second), exactly, biases
    included; so do the norm of the coefficients and siamese scores. One instance serves sequences, images and volumes.
    See `ops.softmax_attention` and its siblings for the equations.

    Args:
        channels: Of the grid, and of its context.
        operator: A row's name in `ops.OPERATORS`, or an `ops.Operator` of one's own.
        heads: Channels are split into this many groups in order.
        project: Which linear maps there are: letters of "qkvo" (query, key, value, output), in that order.
        inner_channels: Of projected queries and keys; the grid's by default.
        value_channels: Of projected values; the grid's by default.
        bias: Whether the maps have one.
        scale: What products are multiplied by, for softmax and Kronecker rows.
        coefficient_norm: Whether coefficients (or responses) are batch-normed, see `CoefficientNorm`.
        residual: Whether the grid is added. With an output map, that map starts at zero: the module is the identity
            at first (to undo: `attention.output.reset_parameters()`).

    Raises:
        LookupError: If there is no such operator.
        ShapeError: If heads do not divide the channels.
        ValueError: If the options do not fit together.

    Reference: KAN Figure 3, SAN Figure 1, FA Figure 1.

    Example:
        >>> import torch
        >>> from farfield.nn import GridAttention
        >>> attention = GridAttention(64, "factorized_gaussian", inner_channels=32, project="qkvo", residual=True)
        >>> image, volume = torch.randn(2, 64, 14, 14), torch.randn(2, 64, 4, 6, 6)
        >>> torch.equal(attention(image), image), attention(image, context=volume).shape
        (True, torch.Size([2, 64, 14, 14]))
    """

    def __init__(
        self,
        channels: int,
        operator: str | Operator,
        *,
        heads: int = 1,
        project: str = "v",
        inner_channels: int | None = None,
        value_channels: int | None = None,
        bias: bool = True,
        scale: float = 1.0,
        coefficient_norm: bool = False,
        residual: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(operator, str):
            if operator not in OPERATORS:
                raise unknown("GridAttention", "operator", operator, OPERATORS)
            self.operator_name, operator = operator, OPERATORS[operator]
        else:
            self.operator_name = next((name for name, row in OPERATORS.items() if row == operator), "custom")
        self.channels, self.operator, self.heads, self.scale, self.residual = channels, operator, heads, scale, residual
        self.inner_channels = channels if inner_channels is None else inner_channels
        self.value_channels = channels if value_channels is None else value_channels
        self.check_options(project)
        inner, width = self.inner_channels, self.value_channels
        self.query = nn.Linear(channels, inner, bias) if "q" in project else None
        self.key = nn.Linear(channels, inner, bias) if "k" in project else None
        self.value = nn.Linear(channels, width, bias) if "v" in project else None
        self.output = nn.Linear(width, channels, bias) if "o" in project else None
        self.weight = nn.Parameter(torch.empty(inner)) if operator.score == "learned" else None
        self.coefficient_norm = CoefficientNorm(operator, heads, width) if coefficient_norm else None
        self.reset_parameters()

    def check_options(self, project: str) -> None:
        """Refuse options that do not fit together."""
        if project != "".join(letter for letter in "qkvo" if letter in project):
            raise ValueError(f'GridAttention: {project=} must be letters of "qkvo", each once and in that order.')
        reads_keys = self.operator.reads_keys
        if "k" in project and not reads_keys:
            letters = project.replace("k", "")
            raise ValueError(f'GridAttention: {self.operator_name} reads no keys; fix: project="{letters}".')
        if self.inner_channels != self.channels and not ("q" in project and ("k" in project or not reads_keys)):
            raise ValueError(
                f"GridAttention: inner_channels={self.inner_channels} needs queries and keys projected to them, "
                f'got {project=}; fix: project="qkv" or leave inner_channels out.'
            )
        if self.value_channels != self.channels and "v" not in project:
            raise ValueError(
                f"GridAttention: value_channels={self.value_channels} needs values projected to them, got {project=}; "
                f'fix: project="{"".join(letter for letter in "qkvo" if letter in project + "v")}".'
            )
        if self.residual and self.value_channels != self.channels and "o" not in project:
            raise ValueError(
                f"GridAttention: a residual adds {self.channels} channels to {self.value_channels}; "
                f'fix: project="{project}o".'
            )
        if self.scale != 1.0 and self.operator.coefficients is not softmax_of_products:
            raise ValueError(
                f"GridAttention: {self.operator_name} has no softmax of products to scale, got scale={self.scale}."
            )
        check_heads("GridAttention", self.heads, self.inner_channels, "query")
        check_heads("GridAttention", self.heads, self.value_channels, "value")

    def reset_parameters(self) -> None:
        """Initialise as torch's linear maps, w as Glorot uniform, and a residual's output map at zero."""
        for linear in (self.query, self.key, self.value, self.output):
            if linear is not None:
                linear.reset_parameters()
        if self.output is not None and self.residual:
            nn.init.zeros_(self.output.weight)
            if self.output.bias is not None:
                nn.init.zeros_(self.output.bias)
        if self.weight is not None:  # Glorot uniform: one map from c/heads to 1 a head
            bound = math.sqrt(6 / (1 + self.inner_channels // self.heads))
            nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        """Name the operator and the options."""
        return (
            f"{self.channels}, {self.operator_name!r}, heads={self.heads}, scale={self.scale}, residual={self.residual}"
        )

    def forward(
        self,
        grid: Float[Tensor, "b c *m"],
        context: Float[Tensor, "b c *n"] | None = None,
        *,
        mask: Bool[Tensor, "b *m"] | None = None,
        context_mask: Bool[Tensor, "b *n"] | None = None,
    ) -> Float[Tensor, "b p *m"]:
        """Attend from every cell of the grid to the grid itself, or to a context.

        Args:
            grid: Asks, and answers if there is no context.
            context: Answers; its sides and rank may differ from the grid's.
            mask: The grid's own real cells; others are read as 0, hold anything and change no response.
            context_mask: The context's real cells.

        Returns:
            `(b, p, *m)` in the grid's dtype and memory format; p are the channels, or `value_channels` without an
            output map.

        Raises:
            ShapeError: If the grids or masks do not fit.
            TypeError: If dtypes do not fit.
        """
        if context is None and context_mask is not None:
            raise ValueError("GridAttention: context_mask is the mask of a context, and there is none; fix: mask=….")
        if context is None:
            return self.respond(grid, self.summarize(grid, mask=mask), mask=mask)
        self.check_input(grid, mask)
        self.check_input(context, context_mask, name="context", mask_name="context_mask")
        if not autocasts(grid):
            check_same_kind("GridAttention", grid=grid, context=context)
        if grid.shape[0] != context.shape[0]:
            fix = "repeat the smaller one, e.g. context.expand(len(grid), *context.shape[1:])."
            problem = "grid and context must have the same batch."
            raise shape_error("GridAttention", problem, fix, grid=grid, context=context)
        return self.respond(grid, self.summarize(context, mask=context_mask), mask=mask)

    def summarize(
        self,
        grid: Float[Tensor, "b c *n"],
        *,
        mask: Bool[Tensor, "b *n"] | None = None,
        origin: Sequence[int] | None = None,
        sides: Sequence[int] | None = None,
    ) -> Summary:
        """Summarize what a grid, or a tile of one, has to say.

        Args:
            grid: The answering grid or tile.
            mask: Its real cells.
            origin: Of a tile: its first index on each axis.
            sides: Of a tile: the sides of the whole.

        Returns:
            A summary; those of tiles merge, in any order, to that of the whole.
        """
        place = self.check_input(grid, mask, origin, sides)
        cells, real = self.operator.answers.gather(grid, mask, place)
        key = self.read_answering(cells, real)
        value = (
            split_heads(cells, self.heads) if self.value is None else cells[:, None]
        )  # every head hears every channel
        summary = summarize(self.operator, key, value, real[:, None], mask is None and place is None)
        if self.value is None:
            return summary
        matrix, bias = affine(self.value, cells)
        return summary.map_values(matrix.unflatten(0, (self.heads, -1)), bias.unflatten(0, (self.heads, -1)))

    def gather_asked(
        self,
        grid: Float[Tensor, "b c *m"],
        *,
        mask: Bool[Tensor, "b *m"] | None = None,
        origin: Sequence[int] | None = None,
        sides: Sequence[int] | None = None,
    ) -> Gathered:
        """Gather the asking cells of a tile, for operators that ask with sums over the whole grid (kronecker_qkv).

        Args:
            grid: The asking grid or tile.
            mask: Its real cells.
            origin: Of a tile: its first index on each axis.
            sides: Of a tile: the sides of the whole.

        Returns:
            Sums and counts; those of tiles merge to those of the whole, for `respond(asked=…)`.
        """
        place = self.check_input(grid, mask, origin, sides)
        return self.operator.asks.gather(grid, mask, place)

    def respond(
        self,
        grid: Float[Tensor, "b c *m"],
        summary: Summary,
        *,
        mask: Bool[Tensor, "b *m"] | None = None,
        origin: Sequence[int] | None = None,
        sides: Sequence[int] | None = None,
        asked: Gathered | tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "b p *m"]:
        """Let every cell of a grid, or of a tile of one, respond to a summary.

        Args:
            grid: The asking grid or tile.
            summary: Of the answering cells.
            mask: The asking grid's real cells; others are read as 0.
            origin: Of a tile: its first index on each axis.
            sides: Of a tile: the sides of the whole.
            asked: Of a tile, for operators that ask with sums: those of the whole, from `gather_asked`.

        Returns:
            The response of each cell.

        Raises:
            ValueError: If a tile's asking sums are missing, or a tile responds while batch norm is in training.
        """
        place = self.check_input(grid, mask, origin, sides)
        if summary.count.shape[0] != grid.shape[0]:
            problem = "grid and summary must have the same batch."
            fix = "summarize as many samples as ask."
            raise shape_error("GridAttention", problem, fix, grid=grid, values=summary.values)
        tiled = place is not None and place[1] != tuple(grid.shape[2:])
        if tiled and asked is None and not self.operator.asks.side_by_side:
            raise ValueError(
                f"GridAttention.respond: {self.operator_name} asks with sums over the whole grid; "
                f"fix: asked=, the merged gather_asked of all tiles."
            )
        if tiled and self.training and self.coefficient_norm is not None:
            raise ValueError("GridAttention.respond: batch norm in training needs the whole grid; fix: .eval().")
        grid = hide(grid, mask)
        cells, real = self.operator.asks.gather(grid, mask) if asked is None else asked
        query, shift = self.read_asking(cells, real), None
        if self.coefficient_norm is not None:
            query, summary, shift = self.coefficient_norm(query * self.scale, real, summary)
        response = self.project_responses(
            query, summary, shift, 1 if self.operator.asks.side_by_side else grid.dim() - 2
        )
        response = in_layout_of(grid, self.operator.asks.scatter(response.to(grid.dtype), grid.shape[2:], place))
        return grid + response if self.residual else response

    def read_answering(self, cells: Tensor, real: Tensor) -> Tensor:
        """Keys, or their scores, of gathered answering cells; sums stay sums."""
        if not self.operator.reads_keys:
            return real[:, None].expand(-1, self.heads, -1, -1)
        return self.read(self.key, cells, None if self.operator.answers.side_by_side else real)

    def read_asking(self, cells: Tensor, real: Tensor) -> Tensor:
        """Queries, or their scores, of gathered asking cells; sums ask as means, an index without a real cell as 0."""
        if self.operator.asks.side_by_side:
            return self.read(self.query, cells)
        return self.read(self.query, cells / real.clamp_min(1), (real > 0).to(cells.dtype))

    def read(self, linear: nn.Module | None, cells: Tensor, count: Tensor | None = None) -> Tensor:
        """Queries or keys `(b, h, d, n)` of cells; their scores `(b, h, 1, n)` where the operator has a vector.

        `count`: of cells that are sums, how many: what a bias is multiplied by.
        """
        vector = None
        if self.operator.score is not None:
            vector = cells.new_ones(self.inner_channels) if self.weight is None else self.weight.to(cells.dtype)
            vector = vector.reshape(self.heads, 1, -1)
        if linear is None:
            heads = split_heads(cells, self.heads)
            return heads if vector is None else vector @ heads
        matrix, bias = affine(linear, cells)
        if vector is not None:  # wᵀ(Wx + b) = (Wᵀw)ᵀx + wᵀb: one row a head
            matrix = (vector @ matrix.unflatten(0, (self.heads, -1)))[:, 0]
            bias = (vector[:, 0] * bias.unflatten(0, (self.heads, -1))).sum(1)
        return split_heads(matrix @ cells + bias[:, None] * (1 if count is None else count), self.heads)

    def project_responses(self, query: Tensor, summary: Summary, shift: Tensor | None, axes: int) -> Tensor:
        """Responses `(b, p, m)` after the output map, which acts on the slots where that is cheaper.

        `axes`: how many responses are added up in each cell; a bias is added once.
        """
        scale = self.scale if self.coefficient_norm is None else 1.0
        if self.output is None:
            response = respond(self.operator, query, summary, scale).flatten(1, 2)
            return response if shift is None else response + shift[:, None].to(response.dtype)
        matrix, bias = affine(self.output, query)
        bias = bias if shift is None else bias + matrix @ shift.to(matrix.dtype)
        if self.folds_output(summary, matrix):
            split = matrix.unflatten(1, (self.heads, -1)).transpose(0, 1)  # (h, p, c)
            summary = summary.map_values(split, bias.new_zeros(split.shape[:2]))
            response = respond(self.operator, query, summary, scale).sum(1)
        else:
            response = matrix @ respond(self.operator, query, summary, scale).flatten(1, 2)
        return response + bias[:, None] / axes

    def folds_output(self, summary: Summary, matrix: Tensor) -> bool:
        """Whether it is cheaper to map the slots than the responses."""
        out, width = matrix.shape
        if self.operator.basis is None:  # as many slots as cells: mapping them costs no more for one head
            return self.heads == 1 and out <= width
        return summary.values.shape[2] * self.heads <= width + out

    def check_input(
        self,
        grid: Tensor,
        mask: Tensor | None,
        origin: Sequence[int] | None = None,
        sides: Sequence[int] | None = None,
        *,
        name: str = "grid",
        mask_name: str = "mask",
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Refuse grids that are not this module's; return where a tile lies."""
        check_grid("GridAttention", name, grid)
        if grid.shape[1] != self.channels:
            problem = f"{name} must have the module's {self.channels} channels, got {grid.shape[1]}."
            raise shape_error("GridAttention", problem, projection_fix(grid, self.channels), **{name: grid})
        check_mask("GridAttention", mask_name, mask, name, grid)
        parameter = next(self.parameters(), None)
        if parameter is not None and parameter.is_floating_point():
            if parameter.device != grid.device:
                raise ValueError(
                    f"GridAttention: {name} is on {grid.device} and the module on {parameter.device}; "
                    f"fix: module.to({name}.device)."
                )
            if parameter.dtype != grid.dtype and not autocasts(grid):
                raise TypeError(
                    f"GridAttention: {name} is {grid.dtype} and the module {parameter.dtype}; "
                    f"fix: module.to({name}.dtype)."
                )
        return check_place("GridAttention", grid, origin, sides)


def affine(module: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Matrix `(out, in)` and bias `(out,)` of any affine module, in the dtype of `like`.

    Read off a bare `nn.Linear`; anything else (LoRA, quantized, hooked) is asked: bias = m(0), matrix = (m(I) - m(0))ᵀ.
    """
    if type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks):
        matrix = module.weight
        bias = matrix.new_zeros(matrix.shape[0]) if module.bias is None else module.bias
        return matrix.to(like.dtype), bias.to(like.dtype)
    parameter = next(module.parameters(), None)
    dtype = parameter.dtype if parameter is not None and parameter.is_floating_point() else accumulation(like.dtype)
    width = cast(int, module.in_features)
    probe = torch.eye(width + 1, width, dtype=dtype, device=like.device)
    answers = module(probe)  # the last row asks with 0
    return (answers[:-1] - answers[-1]).mT.to(like.dtype), answers[-1].to(like.dtype)
