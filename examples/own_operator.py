"""Linear attention with the feature map elu + 1 as your own operator: two functions, and masks and tiles work."""

import torch
from torch.nn.functional import elu

from farfield import cost, ops, pad_grids
from farfield.nn import GridAttention


def basis(key, valid):
    """Weigh each position by the positive features of its key; there is no peak of exponents."""
    return elu(key) + 1, None


def coefficients(query, summary):
    """Weigh each slot by the positive features of the query; the weights sum to 1."""
    share = (elu(query) + 1) * summary.weights
    return share / share.sum(2, keepdim=True)


linear = ops.Operator(basis=basis, coefficients=coefficients)
attention = GridAttention(32, linear, heads=4, project="qkvo", residual=True)

small, large = torch.randn(32, 20, 30), torch.randn(32, 48, 16)
batch, mask = pad_grids([small, large])
together = attention(batch, mask=mask)
torch.testing.assert_close(together[0, :, :20, :30], attention(small[None])[0])
macs = cost.count(attention, (1, 32, 48, 30)).macs
print(f"{tuple(batch.shape)} in one batch of two sizes; {macs:,} MACs a sample")
