"""Restore a stack on disk tile by tile: convolutions overlap, attention covers the whole stack, the result is exact."""

import tempfile
from pathlib import Path

import numpy as np
import tifffile
import torch
from torch import nn

from farfield.nn import GridAttention
from farfield.streaming import plan_whole, predict_whole

torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv3d(1, 8, 3, padding=1),
    nn.ReLU(),
    GridAttention(8, "siamese", project="qkvo", residual=True),
    nn.Conv3d(8, 8, 3, padding=1),
    nn.ReLU(),
    GridAttention(8, "kronecker_qkv", project="qkvo", residual=True),
    nn.Conv3d(8, 1, 3, padding=1),
).eval()
for part in net.modules():  # a residual's output projection starts at zero, so that attention would have no effect
    if isinstance(part, GridAttention):
        part.output.reset_parameters()

with tempfile.TemporaryDirectory() as folder:
    source, target = Path(folder) / "stack.tif", Path(folder) / "restored.tif"
    tifffile.imwrite(source, np.random.default_rng(0).random((20, 70, 90), "float32"))
    stack = tifffile.memmap(source, mode="r")

    plan = plan_whole(net, stack.shape, tile=(None, 32, 32))
    print("\n".join(plan.lines()))
    restored = predict_whole(net, stack, tile=(None, 32, 32), out=target, quiet=True)

    with torch.no_grad():
        whole = net(torch.from_numpy(stack.copy())[None, None])[0, 0]
        apart = torch.cat([net(tile[None, None])[0, 0] for tile in torch.from_numpy(stack.copy()).split(35, 1)], 1)
    print(f"largest difference from the whole: {np.abs(restored - whole.numpy()).max():.0e} in tiles that merge,")
    print(f"{(apart - whole).abs().max():.0e} in halves that are computed separately")
    np.testing.assert_allclose(restored, whole, atol=1e-5)
