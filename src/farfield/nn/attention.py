"""One attention module for every operator, any rank, self and cross attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from farfield._checks import check_same_kind, shape_error, unknown
from farfield.nn.norm import CoefficientNorm
from farfield.nn.projections import affine, draw, is_biased, reading
from farfield.nn.refusals import check_input, check_options, check_version
from farfield.ops._kernels import whole as kernels
from farfield.ops.grid import Gathered, Place, hide, in_layout_of, laid_out_for
from farfield.ops.order import Work, cheaper_order
from farfield.ops.reading import Reading, read, rows_of
from farfield.ops.recompute import read_and_summarize, respond_from
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
        scale: What products are multiplied by, for softmax and Kronecker rows; by default 1/√d, d channels of queries
            and keys a head, as torch's `scaled_dot_product_attention` does. The papers have 1.0.
        coefficient_norm: Whether coefficients or responses are batch-normed; `"columns"` within: see `CoefficientNorm`.
        residual: Whether the grid is added. With an output map, that map starts at zero: the module is the identity
            at first (to undo: `attention.output.reset_parameters()`). Other maps start as Glorot uniform, biases at 0.

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

    _version = 2  # of its state; in 1 kronecker_qkv was the operator as printed, and the default scale 1.0

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
        scale: float | None = None,
        coefficient_norm: bool | Literal["columns"] = False,
        residual: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(operator, str):
            if operator not in OPERATORS:
                raise unknown("GridAttention", "operator", operator, OPERATORS)
            self.operator_name, operator = operator, OPERATORS[operator]
        else:
            self.operator_name = next((name for name, row in OPERATORS.items() if row == operator), "custom")
        self.channels, self.operator, self.heads, self.residual = channels, operator, heads, residual
        self.inner_channels = channels if inner_channels is None else inner_channels
        self.value_channels = channels if value_channels is None else value_channels
        self.has_default_scale, self.scale = scale is None, 1.0 if scale is None else scale
        check_options(self, project)
        if scale is None and operator.coefficients is softmax_of_products:
            self.scale = (self.inner_channels // heads) ** -0.5
        inner, width = self.inner_channels, self.value_channels
        self.query = nn.Linear(channels, inner, bias) if "q" in project else None
        self.key = nn.Linear(channels, inner, bias) if "k" in project else None
        self.value = nn.Linear(channels, width, bias) if "v" in project else None
        self.output = nn.Linear(width, channels, bias) if "o" in project else None
        self.weight = nn.Parameter(torch.empty(inner)) if operator.score == "learned" else None
        within = coefficient_norm == "columns"
        self.coefficient_norm = CoefficientNorm(operator, heads, width, columns=within) if coefficient_norm else None
        self.register_load_state_dict_pre_hook(check_version)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw projections and w as Glorot uniform, biases at 0, and a residual's output projection at zero."""
        for linear in (self.query, self.key, self.value, self.output):
            if linear is not None:
                draw(linear)
        if self.output is not None and self.residual:
            nn.init.zeros_(self.output.weight)
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
        mask: Bool[Tensor, " b *m"] | None = None,
        context_mask: Bool[Tensor, " b *n"] | None = None,
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
            return self.attend_to_itself(grid, mask)
        check_input(self, grid, mask)
        check_input(self, context, context_mask, name="context", mask_name="context_mask")
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
        mask: Bool[Tensor, " b *n"] | None = None,
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
        place = check_input(self, grid, mask, origin, sides)
        answering = self.operator.answers.gather(grid, mask, place)
        _, key = self.readings(grid)
        return self.hear(self.operator, answering, key, None, mask is None and place is None)[1]

    def gather_asked(
        self,
        grid: Float[Tensor, "b c *m"],
        *,
        mask: Bool[Tensor, " b *m"] | None = None,
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
        place = check_input(self, grid, mask, origin, sides)
        return self.operator.asks.gather(grid, mask, place)

    def respond(
        self,
        grid: Float[Tensor, "b c *m"],
        summary: Summary,
        *,
        mask: Bool[Tensor, " b *m"] | None = None,
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
        place = check_input(self, grid, mask, origin, sides)
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
        asking = Gathered(*(self.operator.asks.gather(grid, mask) if asked is None else asked))
        reading, _ = self.readings(grid)
        query = self.read_queries(asking, reading)
        return self.answer(self.operator, grid, asking, reading, query, summary, place)

    def attend_to_itself(self, grid: Tensor, mask: Tensor | None) -> Tensor:
        """Attend within a grid, which is gathered once and read once for keys, queries and values."""
        check_input(self, grid, mask)
        if mask is None and self.is_bare():
            whole = kernels.attention(self.operator, grid, self.readings(grid)[0].matrix, self.heads, self.scale)
            if whole is not None:
                return whole
        cells = math.prod(grid.shape[2:])
        row = cheaper_order(self.operator, self.work(cells, cells))
        answering = row.answers.gather(grid, mask)
        asking = answering if row.asks.gather == row.answers.gather else row.asks.gather(hide(grid, mask), mask)
        reading, key = self.readings(grid)
        also = asking is answering and (key.matrix is None) == (reading.matrix is None)
        query, summary = self.hear(row, answering, key, reading if also else None, mask is None)
        if query is None:
            query = self.read_queries(asking, reading)
        # What was hidden is 0 in the gathered cells already; a residual adds the grid, hidden too.
        grid = hide(grid, mask) if self.residual else grid
        return self.answer(row, grid, asking, reading, query, summary, None)

    def is_bare(self) -> bool:
        """Whether the responses are the operator's, with nothing before and nothing after it."""
        parts = (self.query, self.key, self.value, self.output, self.coefficient_norm)
        return not self.residual and all(part is None for part in parts)

    def work(self, asks: int, answers: int) -> Work:
        """What is multiplied for one sample."""
        channels, out = self.channels * (self.value is not None), self.channels * (self.output is not None)
        norm = self.coefficient_norm
        biased = is_biased(self.output) or (norm is not None and norm.bias is not None)
        return Work(asks, answers, self.inner_channels, self.value_channels, self.heads, channels, out, biased)

    def hear(
        self, row: Operator, answering: Gathered, key: Reading, query: Reading | None, complete: bool
    ) -> tuple[Tensor | None, Summary]:
        """Summarize gathered cells and map the slots' values; where the same cells ask, read their queries too."""
        cells, real = answering
        shared = self.value is not None  # every head hears every channel where the values are mapped later
        if row.basis is None or not row.answers.side_by_side:
            value = cells[:, None] if shared else split_heads(cells, self.heads)
            asked, summary = None, summarize(row, self.read_keys(answering, key), value, real[:, None], complete)
        else:
            options = {"shared": shared, "complete": complete}
            asked, summary = read_and_summarize(row, self.heads, cells, real[:, None], key, query, **options)
        if self.value is None:
            return asked, summary
        matrix, bias = affine(self.value, cells)
        return asked, summary.map_values(*(part.unflatten(0, (self.heads, -1)) for part in (matrix, bias)))

    def answer(
        self,
        row: Operator,
        grid: Tensor,
        asking: Gathered,
        reading: Reading,
        query: Tensor,
        summary: Summary,
        place: Place | None,
    ) -> Tensor:
        """Respond to a summary, norm, map and scatter."""
        shift, norm = None, self.coefficient_norm
        if norm is not None:
            asked = query * self.scale if norm.of_products else query
            query, summary, shift = norm(asked, asking.real, summary, row)
        rank = grid.dim() - 2
        # Normalized, the axes' responses count what they have in common once: of a bias each has all.
        axes = 1 if row.asks.side_by_side or row.asks.normalize is not None else rank
        response = self.project_responses(row, (asking.cells, reading), query, summary, shift, axes)
        response = row.asks.normalized(response, asking.real, rank)
        response = laid_out_for(grid, response.to(grid.dtype))
        response = in_layout_of(grid, row.asks.scatter(response, grid.shape[2:], place))
        return grid + response if self.residual else response

    def readings(self, like: Tensor) -> tuple[Reading, Reading]:
        """How cells are read as queries and as keys; one object where both are the same."""
        vector: Tensor | None = self.weight
        if vector is None and self.operator.score is not None:
            vector = like.new_ones(self.inner_channels)
        query = reading(self.query, vector, self.heads, like)
        return query, query if self.key is self.query else reading(self.key, vector, self.heads, like)

    def read_keys(self, answering: Gathered, reading: Reading) -> Tensor:
        """Keys, or their scores, of gathered answering cells; sums stay sums."""
        if not self.operator.reads_keys:
            return answering.real[:, None].expand(-1, self.heads, -1, -1)
        if self.operator.answers.side_by_side or reading.bias is None:
            return read(reading, answering.cells, self.heads)
        rows = rows_of(answering.cells, reading.matrix, None) + reading.bias[:, None] * answering.real
        return split_heads(rows, self.heads)

    def read_queries(self, asking: Gathered, reading: Reading) -> Tensor:
        """Queries, or their scores, of gathered asking cells; sums ask as means, an index without a real cell as 0."""
        if self.operator.asks.side_by_side:
            return read(reading, asking.cells, self.heads)
        rows = rows_of(asking.cells / asking.real.clamp_min(1), reading.matrix, None)
        rows = rows if reading.bias is None else rows + reading.bias[:, None] * (asking.real > 0)
        return split_heads(rows, self.heads)

    def read_answering(self, cells: Tensor, real: Tensor) -> Tensor:
        """Keys `(b, h, d, n)` of gathered cells, or their scores."""
        return self.read_keys(Gathered(cells, real), self.readings(cells)[1])

    def read_asking(self, cells: Tensor, real: Tensor) -> Tensor:
        """Queries `(b, h, d, m)` of gathered cells, or their scores."""
        return self.read_queries(Gathered(cells, real), self.readings(cells)[0])

    def project_responses(
        self,
        row: Operator,
        asking: tuple[Tensor, Reading],
        query: Tensor,
        summary: Summary,
        shift: Tensor | None,
        axes: int,
    ) -> Tensor:
        """Responses `(b, p, m)` after the output map, which acts on the slots where that is cheaper.

        `asking`: the cells that ask, and how they were read.
        `axes`: how many responses are added up in each cell; a bias is added once.
        """
        if self.output is None:
            return self.combine_slots(row, asking, query, summary, None, shift, axes)
        matrix, bias = affine(self.output, query)
        bias = bias if shift is None else bias + matrix @ shift.to(matrix.dtype)
        slots = summary.values.shape[2]
        if self.work(asking[0].shape[2], slots).folds_output(slots, basis=row.basis is not None):
            split = matrix.unflatten(1, (self.heads, -1)).transpose(0, 1)  # (h, p, c)
            biased = shift is not None or is_biased(self.output)
            return self.combine_slots(row, asking, query, summary, split, bias if biased else None, axes)
        return matrix @ self.combine_slots(row, asking, query, summary, None, None, axes) + bias[:, None] / axes

    def combine_slots(
        self,
        row: Operator,
        asking: tuple[Tensor, Reading],
        query: Tensor,
        summary: Summary,
        matrix: Tensor | None,
        bias: Tensor | None,
        axes: int,
    ) -> Tensor:
        """Responses `(b, p, m)` of heads side by side, or mapped and added up, plus a bias."""
        if row.basis is not None and row.asks.side_by_side:
            return respond_from(row, *asking, query, summary, matrix, bias).flatten(1, 2)
        if matrix is not None:
            summary = summary.map_values(matrix, matrix.new_zeros(matrix.shape[:2]))
        response = respond(row, query, summary, self.scale if self.coefficient_norm is None else 1.0)
        response = response.flatten(1, 2) if matrix is None else response.sum(1)
        return response if bias is None else response + bias[:, None].to(response.dtype) / axes
