"""Networks of MONAI and autoencoders of diffusers: see networks_of_others.py."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from networks_of_others import (
    STACK,
    TILE,
    TILE_3D,
    TILE_VIDEO,
    VIDEO,
    Decode,
    Encode,
    Item,
    Method,
    Network,
    Pair,
    Timed,
)
from torch import nn

GREY = (1, 96, 160)


# ---- MONAI -----------------------------------------------------------------------------------------------------------
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


# ---- diffusers -------------------------------------------------------------------------------------------------------
def diffusers_networks() -> Iterator[tuple[str, Network]]:
    """Yield both halves of the autoencoders of diffusers, of images, videos and sound, and a U-Net."""
    diffusers = importlib.import_module("diffusers")
    flat = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    widths, groups = {"block_out_channels": (16, 32)}, {"norm_num_groups": 4}
    asymmetric = {"down_block_out_channels": (16, 32), "up_block_out_channels": (16, 32)}
    tiny = {f"{half}_block_out_channels": (16, 16, 16) for half in ("encoder", "decoder")}
    few = {"num_encoder_blocks": (1, 1, 1), "num_decoder_blocks": (1, 1, 1)}
    dc = {f"{half}_block_out_channels": (16, 32) for half in ("encoder", "decoder")}
    dc |= {f"{half}_layers_per_block": (1, 1) for half in ("encoder", "decoder")}
    dc |= {f"{half}_qkv_multiscales": ((), (5,)) for half in ("encoder", "decoder")}
    dc |= {f"{half}_block_types": ("ResBlock", "EfficientViTBlock") for half in ("encoder", "decoder")}
    image = {"latent_channels": 8, "layers_per_block": 1, "spatial_compression_ratio": 4, "sample_size": 64}
    # Class, numbers, channels of the latent grid, how much smaller it is.
    images: list[tuple[str, dict[str, Any], int, int]] = [
        ("AutoencoderKL", flat | widths | groups, 4, 2),
        ("AsymmetricAutoencoderKL", flat | asymmetric | groups, 4, 2),
        ("AutoencoderTiny", tiny | few, 4, 4),
        ("VQModel", flat | widths | groups, 3, 2),
        ("AutoencoderDC", dc | {"latent_channels": 8, "attention_head_dim": 8}, 8, 2),
        (
            "AutoencoderKLHunyuanImage",
            image | {"in_channels": 3, "out_channels": 3, "block_out_channels": (32, 64)},
            8,
            2,
        ),
        ("AutoencoderKLFlux2", flat | widths | groups | {"latent_channels": 4}, 4, 2),
        ("AutoencoderKLKVAE", {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "ch_mult": (1, 2)}, 16, 2),
    ]
    for name, numbers, channels, stride in images:
        build = partial(getattr(diffusers, name), **numbers)
        yield f"{name}, encode", Network(lambda build=build: Encode(build()), (3, 64, 96), (32, 32))
        latent = (channels, 64 // stride, 96 // stride)
        yield f"{name}, decode", Network(lambda build=build: Decode(build()), latent, (16, 16))
    wan = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]}
    wan |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    cog = {f"{way}_block_types": (f"CogVideoX{Way}Block3D",) * 2 for way, Way in (("down", "Down"), ("up", "Up"))}
    cog |= {"block_out_channels": (8, 16), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
    hunyuan = {
        f"{way}_block_types": (f"HunyuanVideo{Way}Block3D",) * 4 for way, Way in (("down", "Down"), ("up", "Up"))
    }
    hunyuan |= {"block_out_channels": (8, 8, 16, 16), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
    ltx = {"latent_channels": 8, "block_out_channels": (8, 16), "decoder_block_out_channels": (8, 16)}
    ltx |= {"layers_per_block": (1, 1, 1), "decoder_layers_per_block": (1, 1, 1), "patch_size": 2}
    ltx |= {"spatio_temporal_scaling": (True, False), "decoder_spatio_temporal_scaling": (True, False)}
    ltx |= {"down_block_types": ("LTXVideoDownBlock3D",) * 2, "decoder_inject_noise": (False, False, False)}
    ltx |= {"downsample_type": ("conv", "conv"), "upsample_residual": (False, False), "upsample_factor": (1, 1)}
    magvit = {
        f"{way}_block_types": (f"Spatial{Way}Block3D", f"SpatialTemporal{Way}Block3D")
        for way, Way in (("down", "Down"), ("up", "Up"))
    }
    magvit |= {"block_out_channels": (8, 16), "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 4}
    allegro = {f"{way}_block_types": (f"Allegro{Way}Block3D",) * 2 for way, Way in (("down", "Down"), ("up", "Up"))}
    allegro |= {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    allegro |= {"temporal_downsample_blocks": (True, False), "temporal_upsample_blocks": (False, True)}
    cosmos = {"latent_channels": 4, "encoder_block_out_channels": (8, 16), "decode_block_out_channels": (8, 16)}
    cosmos |= {"attention_resolutions": (8,), "resolution": 64, "num_layers": 1, "patch_size": 2}
    cosmos |= {"spatial_compression_ratio": 4, "temporal_compression_ratio": 2}
    mochi = {"encoder_block_out_channels": (32, 64), "decoder_block_out_channels": (32, 64), "latent_channels": 4}
    mochi |= {"layers_per_block": (1, 1, 1), "temporal_expansions": (2,), "spatial_expansions": (2,)}
    mochi |= {"add_attention_block": (False, True, True), "latents_mean": (0.0,) * 4, "latents_std": (1.0,) * 4}
    of_videos: list[tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...]]] = [
        ("AutoencoderKLWan", wan, VIDEO, (4, 5, 16, 32)),
        ("AutoencoderKLQwenImage", wan, VIDEO, (4, 5, 16, 32)),
        ("AutoencoderKLCogVideoX", cog | {"temporal_compression_ratio": 2}, VIDEO, (4, 4, 16, 32)),
        ("AutoencoderKLHunyuanVideo", hunyuan, VIDEO, (4, 3, 8, 16)),
        ("AutoencoderKLLTXVideo", ltx, VIDEO, (8, 5, 8, 16)),
        ("AutoencoderKLMagvit", magvit, VIDEO, (4, 4, 16, 32)),
        ("AutoencoderKLCosmos", cosmos, VIDEO, (4, 5, 8, 16)),
        ("AutoencoderKLMochi", mochi, VIDEO, (4, 5, 16, 32)),
    ]
    for name, numbers, shape, latent in of_videos:
        build = partial(getattr(diffusers, name), **numbers)
        yield f"{name}, encode", Network(lambda build=build: Encode(build()), shape, TILE_VIDEO)
        yield f"{name}, decode", Network(lambda build=build: Decode(build()), latent, (latent[1], 8, 16))
    # It encodes and decodes in tiles alone, so its halves stand for themselves.
    halves = partial(diffusers.AutoencoderKLAllegro, **allegro)
    yield "AutoencoderKLAllegro, encoder", Network(lambda: halves().encoder, (3, 8, 32, 64), (8, 16, 32))
    yield "AutoencoderKLAllegro, decoder", Network(lambda: halves().decoder, (4, 4, 16, 32), (4, 8, 16))
    temporal = partial(
        diffusers.AutoencoderKLTemporalDecoder,
        down_block_types=("DownEncoderBlock2D",) * 2,
        block_out_channels=(32, 64),
    )
    decode = partial(Decode, num_frames=1)
    yield "AutoencoderKLTemporalDecoder, decode", Network(lambda: decode(temporal()), (4, 32, 48), (16, 16))
    oobleck = {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "channel_multiples": [1, 2]}
    oobleck |= {"decoder_channels": 8, "decoder_input_channels": 8}
    sound = partial(diffusers.AutoencoderOobleck, **oobleck)
    yield "AutoencoderOobleck, encode", Network(lambda: Encode(sound()), (2, 2048), (512,))
    yield "AutoencoderOobleck, decode", Network(lambda: Decode(sound()), (8, 256), (64,))
    unet = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8}
    unet |= {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    yield "UNet2DModel", Network(lambda: Timed(diffusers.UNet2DModel(**unet)), (3, 64, 96), (32, 32))
