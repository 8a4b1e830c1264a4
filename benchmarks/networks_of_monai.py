"""Networks of MONAI: see networks_of_others.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial

from networks_of_others import STACK, TILE, TILE_3D, Item, Method, Network, Pair, Timed
from torch import nn

GREY = (1, 96, 160)


def monai_networks() -> Iterator[tuple[str, Network]]:
    """Yield networks of MONAI: of images and of stacks; segmentation, restoration, registration and classes."""
    nets = importlib.import_module("monai.networks.nets")
    levels: tuple[tuple[int, ...], tuple[int, ...]] = ((8, 16, 32), (2, 2))
    kernels, strides = [[3] * 3] * 3, [[1] * 3, [2] * 3, [2] * 3]
    swin = {"feature_size": 12, "num_heads": (1, 1, 2, 2), "depths": (1, 1, 1, 1)}
    vit = {"hidden_size": 24, "mlp_dim": 48, "num_heads": 2, "spatial_dims": 2}
    down, up = ((2, 4, 1, 1),) * 2, ((2, 4, 1, 1, 0),) * 2
    vae = {"num_res_blocks": 1, "channels": (8, 16), "attention_levels": (False, True), "norm_num_groups": 4}
    of_images: dict[str, Callable[[], nn.Module]] = {
        "UNet": partial(nets.UNet, 2, 1, 2, *levels, num_res_units=2),
        "UNet, group norm": partial(nets.UNet, 2, 1, 2, *levels, norm=("group", {"num_groups": 2})),
        "BasicUNetPlusPlus": partial(nets.BasicUNetPlusPlus, 2, 1, 2, (8, 8, 16, 16, 32, 8)),
        "AttentionUnet": partial(nets.AttentionUnet, 2, 1, 2, *levels),
        "FlexibleUNet": partial(nets.FlexibleUNet, 1, 2, "efficientnet-b0", spatial_dims=2),
        "SegResNetDS": partial(nets.SegResNetDS, 2, 8, 1, 2, blocks_down=(1, 1, 1)),
        "AutoEncoder": partial(nets.AutoEncoder, 2, 1, 1, (8, 16, 32), (2, 2, 2)),
        "Quicknat": partial(nets.Quicknat, 2, 1, 8),
        "VNet": partial(nets.VNet, 2, 1, 2),
        "Restormer": partial(
            nets.restormer.Restormer, 2, 1, 1, dim=8, num_blocks=(1, 1), heads=(1, 2), num_refinement_blocks=1
        ),
        "MedNeXt": partial(nets.MedNeXt, 2, 8, 1, 2, encoder_expansion_ratio=2),
        "HighResNet": partial(nets.HighResNet, 2, 1, 2),
        "DiffusionModelUNet": lambda: Timed(nets.DiffusionModelUNet(2, 1, 1, **vae, num_head_channels=8)),
        "VQVAE": lambda: Item(nets.VQVAE(2, 1, 1, (8, 8), 1, (8, 8), down, up, 16, 8), 0),
        "AutoencoderKL, encode": lambda: Item(Method(nets.AutoencoderKL(2, **vae), "encode"), 0),
        "PatchDiscriminator": lambda: Item(nets.PatchDiscriminator(2, 8, 1), -1),
        "SwinUNETR, 2-D": partial(nets.SwinUNETR, 1, 2, **swin, spatial_dims=2),
        "SwinUNETR version 2, 2-D": partial(nets.SwinUNETR, 1, 2, **swin, spatial_dims=2, use_v2=True),
        "UNETR": partial(nets.UNETR, 1, 2, (96, 160), feature_size=8, **vit),
        "ViTAutoEnc": lambda: Item(nets.ViTAutoEnc(1, (96, 160), 16, num_layers=2, **vit), 0),
        "GlobalNet": partial(nets.GlobalNet, (96, 160), 2, 1, 4, 2),
        "LocalNet": partial(nets.LocalNet, 2, 1, 4, (0, 1), out_activation=None, out_channels=2),
        "DenseNet121": partial(nets.DenseNet121, 2, 1, 3),
        "EfficientNetBN": partial(nets.EfficientNetBN, "efficientnet-b0", False, spatial_dims=2, in_channels=1),
        "ResNet-18": partial(nets.resnet18, spatial_dims=2, n_input_channels=1),
        "SEResNet50": partial(nets.SEResNet50, spatial_dims=2, in_channels=1, num_classes=3),
    }
    for name, build in of_images.items():
        yield name, Network(build, (1, 128, 192) if "SwinUNETR" in name else GREY, TILE)
    of_stacks: dict[str, Callable[[], nn.Module]] = {
        "BasicUNet": partial(nets.BasicUNet, 3, 1, 2, (8, 8, 16, 16, 32, 8)),
        "DynUNet": partial(nets.DynUNet, 3, 1, 2, kernels, strides, strides[1:], filters=[8, 16, 32]),
        "SegResNet": partial(nets.SegResNet, 3, 8, 1, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
        "SegResNetVAE": partial(nets.SegResNetVAE, (32, 32, 80), blocks_down=(1, 1, 1, 1)),
        "RegUNet": partial(nets.RegUNet, 3, 1, 4, 2),
        "SwinUNETR": partial(nets.SwinUNETR, 1, 2, **swin),
        "ResNet-10": partial(nets.resnet10, spatial_dims=3, n_input_channels=1),
    }
    for name, build in of_stacks.items():
        yield f"{name}, 3-D", Network(build, (1, 32, 32, 96) if name == "SwinUNETR" else STACK, TILE_3D)
    decoder = partial(nets.AutoencoderKL, 2, latent_channels=1, **vae)
    yield "AutoencoderKL, decode", Network(lambda: Method(decoder(), "decode"), (1, 32, 48), (16, 16))
    yield "AHNet, 2-D", Network(partial(nets.AHNet, (1, 1, 1, 1), 2, 1, 2), (1, 128, 256), TILE)
    yield "DAF3D, 3-D", Network(partial(nets.DAF3D, 1, 2), (1, 32, 32, 64), TILE_3D)
    hover = partial(nets.HoVerNet, mode="fast", out_classes=3)
    yield "HoVerNet", Network(hover, (3, 256, 256), (164, 164), {"nucleus_prediction": None})
    yield "MILModel", Network(partial(nets.MILModel, 2, pretrained=False, backbone="resnet18"), (4, 3, 64, 64), TILE_3D)

    def voxel(place: int) -> nn.Module:
        unet = nets.VoxelMorphUNet(2, 2, 8, (8, 8, 8, 8), (8, 8))
        return Pair(nets.VoxelMorph(unet, spatial_dims=2), place)

    yield "VoxelMorph, warped", Network(partial(voxel, 0), (2, 96, 160), TILE)
    yield "VoxelMorph, field", Network(partial(voxel, 1), (2, 96, 160), TILE)
