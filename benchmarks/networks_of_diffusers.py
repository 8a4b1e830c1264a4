"""Autoencoders of diffusers: see networks_of_others.py."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from networks_of_others import TILE_VIDEO, VIDEO, Decode, Encode, Network, Timed


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
