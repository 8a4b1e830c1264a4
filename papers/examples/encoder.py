"""Use KANet as an encoder for another library: pyramid features through timm."""

import timm
import torch

from farfield_papers import models

models.register_timm()
encoder = timm.create_model("kanet_qkv", features_only=True)
for channels, reduction, grid in zip(
    encoder.feature_info.channels(), encoder.feature_info.reduction(), encoder(torch.randn(1, 3, 192, 256)), strict=True
):
    print(f"1/{reduction:<3} {channels:4} channels  {tuple(grid.shape[2:])}")
