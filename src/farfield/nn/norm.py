"""Batch norm of coefficients or responses, without forming the matrix that is normed."""

from __future__ import annotations

from typing import Literal, cast

import torch
import torch.distributed as distributed
from torch import Tensor, nn

from farfield._processes import all_gather
from farfield.nn.bare import is_bare
from farfield.nn.initialization import DrawnByItself
from farfield.ops.grid import accumulation, nonzero
from farfield.ops.modes import full_precision
from farfield.ops.moments import Moments, pooled_moments, product_moments, response_moments
from farfield.ops.slots import Summary, keys_of_slots, products, shares, weight
from farfield.ops.table import Operator


class CoefficientNorm(nn.Module):
    """Batch norm inside an operator: of its coefficient matrix, or of its responses.

    Where coefficients are a softmax of products, it is batch norm of the products before the softmax, with the heads as
    features (KAN): the shift cancels in the softmax, and one factor per head on the queries remains. Otherwise it is
    batch norm of the responses, with their channels as features (SAN): a factor on the slots and a shift.

    Statistics are those of `torch.nn.BatchNorm2d` on the explicit matrix, computed from the moments of queries, keys
    and slots, in float32 at least; in distributed training they are those of all processes. Running statistics in
    float16 are clamped to 65,504, the variance for a standard deviation of 256. Where responses vary more, keep the
    norm of a half-precision module in float32: `attention.coefficient_norm.float()`.

    A column of the matrix holds the products of one query with all keys, and their mean cancels in the softmax as well.
    For `kronecker_qkv` the differences between the column means are nearly all of the variance (97 % at the start), so
    that its softmax is nearly flat. With `columns` the variance is that within columns, and the normed products have a
    standard deviation of 1 within columns for any operator.

    Normed responses are as large as the features that a network adds them to, whatever they hold. If the weights start
    at 0, the network starts without responses, and training decides how much of them it adds.

    Args:
        operator: The operator whose coefficients or responses are normed.
        heads: Number of heads.
        channels: Channels of the response.
        columns: Whether products are divided by their standard deviation within columns; only for a softmax of
            products.
        start: The first value of the weights: "one", as in batch norm, or "zero", for a norm of responses.
        eps: Added to the variance.
        momentum: Weight of a batch in the running statistics.

    Raises:
        ValueError: If the responses are normed and the operator adds them along axes, so that their statistics have no
            closed form; for columns without a softmax of products; or for a norm of products that starts at 0.

    Reference: KAN §4.1, SAN Appendix.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    bias: nn.Parameter | None
    # Modules that were saved whole may be older than it.
    start: Literal["zero", "one"] = "one"
    _is_hf_initialized = DrawnByItself()

    def __init__(
        self,
        operator: Operator,
        heads: int,
        channels: int,
        *,
        columns: bool = False,
        start: Literal["zero", "one"] = "one",
        eps: float = 1e-5,
        momentum: float = 0.1,
    ) -> None:
        super().__init__()
        self.operator, self.heads, self.eps, self.momentum = operator, heads, eps, momentum
        self.columns, self.of_products, self.start = columns, operator.has_scale, start
        if columns and not self.of_products:
            fix = "coefficient_norm=True norms its responses."
            raise ValueError(
                f"CoefficientNorm: columns=True needs a softmax of products, which this operator has not; fix: {fix}"
            )
        if start == "zero" and self.of_products:
            problem = 'start="zero" is for a norm of responses; with products of 0 all positions have one response'
            raise ValueError(f'CoefficientNorm: {problem}; fix: start="one".')
        if not (self.of_products or operator.queries_from.side_by_side):
            problem = "responses that are added along axes have no statistics in closed form"
            raise ValueError(f"CoefficientNorm: {problem}; fix: coefficient_norm=False.")
        features = heads if self.of_products else channels
        self.weight = nn.Parameter(torch.empty(features))
        self.register_parameter("bias", None if self.of_products else nn.Parameter(torch.empty(features)))
        self.register_buffer("running_mean", torch.empty(features))
        self.register_buffer("running_var", torch.empty(features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to its start and the running variance to 1; the bias, the running mean and the count to 0."""
        nn.init.constant_(self.weight, 0.0 if self.start == "zero" else 1.0)
        nn.init.ones_(self.running_var)
        nn.init.zeros_(self.running_mean)
        nn.init.zeros_(self.num_batches_tracked)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Return the options, for `repr`."""
        of = ("columns" if self.columns else "coefficients") if self.of_products else "responses"
        return f"{len(self.weight)}, of {of}, eps={self.eps}, momentum={self.momentum}"

    def forward(
        self, query: Tensor, query_valid: Tensor, summary: Summary, operator: Operator | None = None
    ) -> tuple[Tensor, Summary, Tensor | None]:
        """Fold the norm into the query and the summary.

        Args:
            query: Queries `(b, h, d, m)`, already multiplied by the scale of the products if there is one.
            query_valid: `(b, 1, m)`, more than 0 where a query is valid.
            summary: The summary of keys and values.
            operator: The operator that made the summary, which may take its products in another order; by default the
                module's own.

        Returns:
            The queries and the summary, normed, and a shift `(channels,)` of the responses or None.
        """
        with full_precision(query):
            mean, variance = self.statistics(
                query, (query_valid[:, None] > 0).to(query_valid.dtype), summary, operator or self.operator
            )
            scale = self.scale_of(variance)
            if self.bias is None:
                return query * scale[:, None, None].to(query.dtype), summary, None
            values = summary.values * scale.unflatten(0, (self.heads, 1, -1)).to(summary.values.dtype)
            return query, summary._replace(values=values), self.bias - mean * scale

    @property
    def option(self) -> bool | Literal["columns", "zero"]:
        """The value of `GridAttention`'s `coefficient_norm` that builds this norm."""
        return "columns" if self.columns else "zero" if self.start == "zero" else True

    @property
    def is_factor(self) -> bool:
        """Whether the norm multiplies queries with `factors` and does no more: one of products, in eval mode."""
        return not self.training and self.of_products and is_bare(self, CoefficientNorm)

    def factors(self) -> Tensor:
        """Return the factors of the queries, `(heads,)`."""
        return self.scale_of(self.running_var.to(accumulation(self.running_var.dtype)))

    def scale_of(self, variance: Tensor) -> Tensor:
        """Return the factor of each feature."""
        return self.weight.to(variance.dtype) / (variance + self.eps).sqrt()

    def statistics(
        self, query: Tensor, query_valid: Tensor, summary: Summary, operator: Operator
    ) -> tuple[Tensor, Tensor]:
        """Return the mean and variance of each feature: of the batch in training, which update the running ones."""
        wide = accumulation(self.running_var.dtype)
        if not self.training:
            return self.running_mean.to(wide), self.running_var.to(wide)
        moments = self.moments(query, query_valid, summary, operator)
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            moments = gather_moments(moments)
        mean, variance, count = moments.mean.flatten(), moments.variance.flatten(), moments.count
        with torch.no_grad():
            unbiased = variance * (count / (count - 1).clamp_min(1))
            for running, batch in ((self.running_mean, mean), (self.running_var, unbiased)):
                limit = torch.finfo(running.dtype).max
                running.copy_(running.to(wide).lerp(batch.to(wide), self.momentum).clamp(-limit, limit))
            self.num_batches_tracked += 1
        return mean, variance

    def moments(self, query: Tensor, query_valid: Tensor, summary: Summary, operator: Operator) -> Moments:
        """Return the moments of the coefficients or responses, in closed form."""
        if self.of_products:
            keys = (cast(Tensor, summary.keys) / weight(query, summary)).mT
            key_valid = (summary.weights > 0).to(query_valid.dtype)
            if summary.positions is not None:  # weights whose sum is the number of keys, so that a constant is none
                share = shares(summary)
                key_valid = share * (key_valid.sum() / nonzero(share.sum()))
            return product_moments(query, query_valid, keys, key_valid.mT, columns=self.columns)
        slots = summary.values / operator.per(query, summary)
        if operator.coefficients is products:  # slotsᵀ(KᵀQ) = (slotsᵀKᵀ)Q: as many slots as channels
            return response_moments(keys_of_slots(summary).to(slots.dtype).mT @ slots, query, query_valid)
        return response_moments(slots, operator.coefficients(query, summary), query_valid)


def norm_of(operator: Operator) -> bool | Literal["columns"]:
    """Return the `coefficient_norm` that an operator needs if its response is added to a grid; False if none."""
    # Averages of averages differ so little between positions that their responses would be too small beside the grid.
    # Axis means are such averages: with a norm within columns the products before their softmax have a standard
    # deviation of 1. The basis of `factorized_gaussian` weighs positions nearly equally at first, so its responses are
    # normed. A softmax over single positions needs no norm, and neither do operators without a softmax.
    if not operator.has_scale:
        return operator.averages
    return False if operator.keys_from.side_by_side else "columns"


def gather_moments(moments: Moments) -> Moments:
    """Return the moments of the batches of all processes together, differentiably."""
    own = torch.stack([moments.mean, moments.variance, moments.count.expand_as(moments.mean)])
    mean, variance, count = all_gather(own).unbind(1)
    return pooled_moments(mean, variance, count.flatten(1)[:, 0])
