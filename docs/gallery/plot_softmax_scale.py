"""The scale of a softmax
=========================

The effective number of keys, the exponential of the entropy of an attention row, for random queries and keys of
variance 1. Without a scale the products grow with the channels until one key takes all the weight; with 1/√c, which is
the default of `farfield.nn.GridAttention`, the number does not depend on the channels. The networks of KAN and
SAN pass `scale=1.0` and normalize afterwards: :doc:`/guide/operators`.
"""

import matplotlib.pyplot as plt
import torch

from farfield import maps
from farfield.nn import GridAttention

torch.manual_seed(0)
CHANNELS = [2**power for power in range(1, 10)]
SCALES = {"scale = 1": 1.0, "scale = 1/√c": None}


def attention_rows(channels: int, scale: float | None) -> torch.Tensor:
    """Return the rows of 24 queries over 32 × 32 keys."""
    attention = GridAttention(channels, "softmax", project="", scale=scale)
    queries, keys = torch.randn(1, channels, 24), torch.randn(1, channels, 1024)
    return torch.stack([maps.attention_row(attention, queries, (i,), context=keys)[0, 0] for i in range(24)])


figure, (left, right) = plt.subplots(1, 2, figsize=(8, 4.4), layout="constrained")
for name, scale in SCALES.items():
    effective = [attention_rows(c, scale).clamp_min(1e-30) for c in CHANNELS]
    effective = torch.stack([torch.exp(-(rows * rows.log()).sum(1)) for rows in effective])
    line = left.plot(CHANNELS, effective.median(1).values, "o-", label=name)[0]
    low, high = effective.quantile(torch.tensor([0.1, 0.9]), dim=1)
    left.fill_between(CHANNELS, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    right.semilogy(attention_rows(64, scale)[0].sort(descending=True).values, color=line.get_color())

left.set(xscale="log", yscale="log", xlabel="channels c", title="effective number of keys, of 1024")
left.set_xticks(CHANNELS, CHANNELS)
left.minorticks_off()
left.legend(frameon=False, loc="lower left")
right.axhline(1 / 1024, color="gray", linestyle=":")
right.text(1024, 1.3 / 1024, "mean of all keys", color="gray", ha="right")
right.set(ylim=(1e-9, 2), xlabel="key, largest weight first", title="weights of one query, c = 64")
for axis in (left, right):
    axis.spines[["top", "right"]].set_visible(False)
plt.show()
