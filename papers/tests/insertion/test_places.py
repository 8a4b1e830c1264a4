"""`places` and `insert` on layers of the papers' compact networks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from farfield import insert, insertion
from farfield_papers.nn import AttentionBlock, BaseBlock
from farfield_papers.nn.conv_norm_act import convolved
from helpers.listing import accepts, paths
from helpers.small_hosts import identity, image


def compact() -> nn.Module:
    """Layers of the compact networks, which run several of torch's as one: not for one more."""
    blocks = [BaseBlock(8, 8, expansion=2), AttentionBlock(8, 8, "kronecker_kv", expansion=2)]
    return nn.Sequential(convolved(3, 8, kernel=3, stride=2), nn.Sequential(*blocks))


def test_layers_of_compact_networks() -> None:
    model = compact().eval()
    listed = {place.path for place in insertion.places(model, image)}
    assert {"0.convolution", "0.norm", "0.activation", "1.0.project.norm", "1.0", "1.1.attention", "1.1", "1"} <= listed
    assert {"0", "1.0.project", "1.1.expand"}.isdisjoint(listed)
    # The values' projection gets means along axes, channels last.
    layouts = (None, "channels_last")
    assert listed == {
        path for path in paths(model, image) if any(accepts(model, path, image, each) for each in layouts)
    }


def test_the_output_is_as_exact_as_before() -> None:
    # To the bit where the same kernels run. Else the numbers are rounded in another order, which is no worse: at most
    # twice the model's own distance from its output in float64.
    torch.manual_seed(0)
    where = ["*.convolution", "1.0.*.*", "1.1.*.norm", "1.*", "1"]
    model, example = compact().eval(), torch.rand(1, 3, 16, 16)

    def output(model: nn.Module, example: Tensor) -> Tensor:
        with torch.no_grad():
            return model(example)

    before, exact = output(model, example), output(copy.deepcopy(model).double(), example.double())
    added = insert(model, where, identity, example=example, layout="channels_first")
    grids: list[bool] = []
    for module in added.values():
        module.register_forward_hook(lambda module, inputs, grid: grids.append(torch.equal(inputs[0], grid)))
    error = (output(model, example) - exact).norm()
    assert all(grids)
    assert len(grids) == len(added) >= 7
    assert error <= 2 * (before - exact).norm()
