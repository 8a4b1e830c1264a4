"""One attention module for every operator, any number of spatial dims, self- and cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor, nn

from farfield._checks import add_memory_note
from farfield._refusals import door
from farfield.nn.bare import read_projection
from farfield.nn.checks import (
    check_context,
    check_input,
    check_norm,
    check_options,
    check_order,
    check_summary,
    check_version,
)
from farfield.nn.initialization import DrawnByItself, draw, draw_learned
from farfield.nn.norm import CoefficientNorm
from farfield.nn.scripting import refuse_to_script
from farfield.ops.engine import attend, respond_grid, summarize_grid
from farfield.ops.grid import Gathered, hide, measure
from farfield.ops.projection import Call, map_heads
from farfield.ops.slots import Summary
from farfield.ops.table import Operator, look_up_operator

# The letter of a projection -> its name; and the names of what operators learn (`Operator.parameter_shapes`).
PROJECTIONS = {"q": "query", "k": "key", "v": "value", "o": "output"}
LEARNED = ("weight", "latents", "query_map", "key_map")


class GridAttention(nn.Module):
    """Attend over a grid of any number of spatial dims by any operator, with linear projections around it.

    `output(attention(query(X), key(Y), value(Y)))`, plus X if residual.

    The value projection acts on the summary and not on the grid (reduce first, project second), exactly, bias included,
    unless heads have so many latents that it takes more MACs; so does the output projection where that takes fewer. A
    projection with hooks or a patched `forward` is called on the positions instead. The norm acts on queries or slots,
    and siamese scores are part of the query and key projections. One instance takes sequences, images and volumes. The
    equations are in `ops.softmax_attention` and the functions of the other operators.

    Args:
        channels: Channels of the grid and of the context.
        operator: A name in `ops.OPERATORS`, or an `ops.Operator` of your own.
        heads: Number of heads; channels are split into them in order.
        project: Which linear projections there are: letters of "qkvo" (query, key, value, output), in any order.
        inner_channels: Channels of projected queries and keys; `channels` by default.
        value_channels: Channels of projected values; `channels` by default.
        bias: Whether the projections have a bias.
        scale: Factor of the products of queries and keys, for softmax and Kronecker operators; by default 1/√d for d
            channels of queries and keys per head, as in torch's `scaled_dot_product_attention`. The papers have 1.0.
        coefficient_norm: Whether coefficients or responses are batch-normed; `"columns"`, and `"zero"` for a norm of
            responses whose weights start at 0: see `CoefficientNorm`.
        residual: Whether the grid is added to the response. An output projection then starts at zero, so that the
            module is the identity at first (to undo: `attention.output.reset_parameters()`). Other projections start as
            Glorot uniform, biases at 0.

    Raises:
        LookupError: If there is no such operator.
        ShapeError: If heads do not divide the inner channels or the value channels.
        TypeError: If channels are no number, or the operator is neither a name nor an `ops.Operator`.
        ValueError: If the options do not fit together, or heads are not a whole number from 1.

    Reference: KAN Figure 3, SAN Figure 1, FA Figure 1.

    Example:
        >>> import torch
        >>> from farfield.nn import GridAttention
        >>> attention = GridAttention(64, "factorized_gaussian", inner_channels=32, project="qkvo", residual=True)
        >>> image, volume = torch.randn(2, 64, 14, 14), torch.randn(2, 64, 4, 6, 6)
        >>> torch.equal(attention(image), image), attention(image, context=volume).shape
        (True, torch.Size([2, 64, 14, 14]))
    """

    # Of the state dict. In version 1 `kronecker_qkv` was today's `kronecker_qkv_literal`, and the default scale 1.0.
    _version = 2
    _is_hf_initialized = DrawnByItself()
    weight: nn.Parameter | None
    latents: nn.Parameter | None
    query_map: nn.Parameter | None
    key_map: nn.Parameter | None

    __prepare_scriptable__ = staticmethod(refuse_to_script)

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
        coefficient_norm: bool | Literal["columns", "zero"] = False,
        residual: bool = False,
    ) -> None:
        super().__init__()
        check_order(channels, operator)
        with door("GridAttention"):
            self.operator_name, operator = look_up_operator(operator)
        self.channels, self.operator, self.heads, self.residual = channels, operator, heads, residual
        self.inner_channels = channels if inner_channels is None else inner_channels
        self.value_channels = channels if value_channels is None else value_channels
        self.has_default_scale, self.scale = scale is None, 1.0 if scale is None else scale
        check_options(self, project)
        check_norm(self, project, coefficient_norm)
        if scale is None and operator.has_scale:
            self.scale = (self.inner_channels // heads) ** -0.5
        inner, width = self.inner_channels, self.value_channels
        self.query = nn.Linear(channels, inner, bias) if "q" in project else None
        self.key = nn.Linear(channels, inner, bias) if "k" in project else None
        self.value = nn.Linear(channels, width, bias) if "v" in project else None
        self.output = nn.Linear(width, channels, bias) if "o" in project else None
        shapes = operator.parameter_shapes(inner, heads)
        for name in LEARNED:
            self.register_parameter(name, nn.Parameter(torch.empty(shapes[name])) if name in shapes else None)
        self.coefficient_norm = None
        if coefficient_norm:
            within, start = coefficient_norm == "columns", coefficient_norm == "zero"
            norm = CoefficientNorm(operator, heads, width, columns=within, start="zero" if start else "one")
            self.coefficient_norm = norm
        self.register_load_state_dict_pre_hook(check_version)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw projections and the vector of learned scores as Glorot uniform; set biases to 0.

        With a residual, the output projection is set to 0. Latents are drawn as normal with a standard deviation of
        1/√d for d channels per head; learned maps are set to the identity. The norm keeps its parameters and
        statistics.
        """
        for linear in (self.query, self.key, self.value, self.output):
            if linear is not None:
                draw(linear)
        if self.output is not None and self.residual:
            nn.init.zeros_(self.output.weight)
        own = dict(self.named_parameters(recurse=False))  # perhaps with those of a subclass, or a weight in parts
        for name in self.operator.parameter_shapes(self.inner_channels, self.heads):
            if name in own:
                draw_learned(name, own[name], self.heads)

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
        context_weight: Real[Tensor, " b *n"] | None = None,
    ) -> Float[Tensor, "b p *m"]:
        """Attend from every position of the grid to the grid itself, or to a context.

        Args:
            grid: The query grid; keys and values come from it too if there is no context.
            context: The grid that keys and values come from; its size and spatial dims may differ from the grid's.
            mask: True where a position of the grid is valid; others may hold anything, are read as 0 and change no
                response.
            context_mask: True where a position of the context is valid.
            context_weight: What each position that keys and values come from counts for, such as its area or volume:
                numbers from 0, which masks it. Without a context it is of the grid. Queries that are means along axes
                have no weights.

        Returns:
            `(b, p, *m)` in the grid's dtype and memory format; p is `channels`, or `value_channels` without an output
            projection.

        Raises:
            ShapeError: If the grids or masks do not fit the module or each other.
            TypeError: If a grid is not floating-point of the module's dtype (any under autocast), or a mask is not
                boolean.
            ValueError: If there is a context mask without a context, the tensors are on different devices, or a weight
                is negative or not finite.
        """
        check_input(self, grid, mask)
        check_context(self, grid, context, context_mask, context_weight)
        if context is not None:
            summary = self.summarize(context, mask=context_mask, weight=context_weight)
            return self.respond(grid, summary, mask=mask)
        valid, weight = (mask, None) if context_weight is None else measure(mask, context_weight, grid)
        try:
            call = self.call_for(grid)
            response = attend(call, grid, grid, grid, mask=valid, query_mask=mask, weight=weight)
        except RuntimeError as error:
            if not self.operator.merges_by_adding:
                add_memory_note("GridAttention", self.operator_name, grid, grid, self.heads, error)
            raise
        return hide(grid, mask) + response if self.residual else response

    def summarize(
        self,
        grid: Float[Tensor, "b c *n"],
        *,
        mask: Bool[Tensor, " b *n"] | None = None,
        weight: Real[Tensor, " b *n"] | None = None,
        origin: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
    ) -> Summary:
        """Summarize the keys and values of a grid, or of a tile of one.

        Args:
            grid: The key grid, or the tile.
            mask: True where a position is valid.
            weight: What each position counts for, as `context_weight` of `forward`; the tile's part of it.
            origin: For a tile, its first index on each axis; None for a whole grid.
            size: For a tile, the size of the whole grid; None for a whole grid.

        Returns:
            The summary. The summaries of all tiles, merged by `summary.merge(other)` in any order, are the summary of
            the whole grid.

        Raises:
            ShapeError: If the grid or mask does not fit the module, or the tile does not lie in the whole grid.
            TypeError: If the grid is not floating-point of the module's dtype (any under autocast), or the mask is not
                boolean.
            ValueError: If only one of `origin` and `size` is given, the tensors are on different devices, or a weight
                is negative or not finite.
        """
        place = check_input(self, grid, mask, origin, size, weight)
        mask, weight = (mask, None) if weight is None else measure(mask, weight, grid)
        return summarize_grid(self.call_for(grid), grid, mask=mask, weight=weight, place=place)

    def gather_queries(
        self,
        grid: Float[Tensor, "b c *m"],
        *,
        mask: Bool[Tensor, " b *m"] | None = None,
        origin: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
    ) -> Gathered:
        """Sum a tile along the axes, for operators whose queries are axis means of the whole grid (kronecker_qkv).

        Args:
            grid: The query grid, or the tile.
            mask: True where a position is valid.
            origin: For a tile, its first index on each axis; None for a whole grid.
            size: For a tile, the size of the whole grid; None for a whole grid.

        Returns:
            The sums and the numbers of valid positions in them. Those of all tiles, merged by `sums.merge(other)`, are
            those of the whole grid, for `respond(query_sums=…)`.

        Raises:
            ShapeError, TypeError, ValueError: As `summarize`.
        """
        place = check_input(self, grid, mask, origin, size)
        return self.operator.queries_from.gather(grid, mask, place)

    def respond(
        self,
        grid: Float[Tensor, "b c *m"],
        summary: Summary,
        *,
        mask: Bool[Tensor, " b *m"] | None = None,
        origin: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        query_sums: Gathered | tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "b p *m"]:
        """Respond to a summary at every position of a grid, or of a tile of one.

        Args:
            grid: The query grid, or the tile.
            summary: The summary of the keys and values of a whole grid, from `summarize`.
            mask: True where a position of the query grid is valid; others are read as 0.
            origin: For a tile, its first index on each axis; None for a whole grid.
            size: For a tile, the size of the whole query grid; None for a whole grid.
            query_sums: For a tile, if queries are axis means: the merged `gather_queries` of all tiles.

        Returns:
            `(b, p, *m)`, the response of each position, plus the grid if residual; p as in `forward`.

        Raises:
            ShapeError, TypeError: As `summarize`, or if the summary has another batch size.
            ValueError: As `summarize`, or if a tile's query sums are missing, or the module is in training mode and has
                a norm, which needs the whole grid.
        """
        place = check_input(self, grid, mask, origin, size)
        check_summary(self, grid, summary, place, query_sums is not None)
        sums = None if query_sums is None else Gathered(*query_sums)
        response = respond_grid(self.call_for(grid), grid, summary, mask=mask, place=place, query_sums=sums)
        return hide(grid, mask) + response if self.residual else response

    def call_for(self, grid: Tensor) -> Call:
        """Return the operator with this module's projections, as matrices and biases or to be run, and its norm."""
        letters = (self.query, self.key, self.value, self.output)
        query, key, value, output = (read_projection(part, grid) for part in letters)
        key = query if self.key is self.query else key
        if self.operator.score is not None:
            # Modules that were saved whole may be older than a name.
            own = {name: getattr(self, name, None) for name in LEARNED}
            learned = {name: each.to(grid.dtype) for name, each in own.items() if each is not None}
            learned = learned or {"weight": grid.new_ones(self.inner_channels)}
            query, key = map_heads(self.operator, query, key, learned, self.heads)
        return Call(self.operator, self.heads, self.scale, query, key, value, output, self.coefficient_norm)
