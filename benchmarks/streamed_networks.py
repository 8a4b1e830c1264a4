"""Run networks of other libraries in tiles and compare with the whole: exact, or refused with the reason.

    python benchmarks/streamed_networks.py
    python benchmarks/streamed_networks.py --network "MONAI UNet" --json streamed.json
    python benchmarks/streamed_networks.py --sweep --json benchmarks/records/streamed_networks.jsonl
    python benchmarks/streamed_networks.py --sweep --network timm/resnet monai/

Networks have random weights, norms random scales and offsets. `tiles` is the largest difference between predict_whole
and the network on the whole volume, relative to the largest number; `independent tiles` is that of a sliding window
with the same tiles and overlap, in which each tile has statistics of its own. `work` is the MACs of all passes relative
to those of the network on the whole volume: small volumes have large halos.

`--sweep` judges the networks of networks_of_others.py and of the files beside it, as streamed_sweep.py says, writes the
file after each, and does not repeat what it has for the same versions of farfield, torch and the library.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from networks_of_others import Decode, Encode
from torch import Tensor, nn

from farfield.nn import GridAttention
from farfield.streaming import StreamingPlan, plan_whole, predict_whole


class Setting(NamedTuple):
    """A network and a volume.

    Attributes:
        build: Makes the network.
        shape: Shape of the volume, with channels.
        tile: Size of the tiles.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tile: tuple[int | None, ...]


# Sizes that the strides divide and the tiles do not.
IN_3D, TILE_3D = (1, 12, 20, 60), (8, 16, 24)
IN_2D, TILE_2D = (1, 92, 148), (48, 48)
# Networks with long receptive fields: tiles are cut along the last axis.
LONG_3D, TILE_LONG_3D = (1, 16, 16, 336), (16, 16, 64)
LONG_2D, TILE_LONG_2D = (1, 64, 1248), (64, 128)


def settings() -> dict[str, Setting]:
    """Return the networks by name."""
    return {**monai_networks(), **nnunet_networks(), **diffusers_networks(), **smp_networks(), **care_networks()}


def monai_networks() -> dict[str, Setting]:
    """Return networks of MONAI, in two and three dimensions."""
    from monai.networks import nets

    settings = {}
    for dims, shape, tile, long, tile_long in (
        (2, IN_2D, TILE_2D, LONG_2D, TILE_LONG_2D),
        (3, IN_3D, TILE_3D, LONG_3D, TILE_LONG_3D),
    ):
        kernels, strides = [[3] * dims] * 3, [[1] * dims, [2] * dims, [2] * dims]
        swin = {"feature_size": 12, "num_heads": (1, 1, 2, 2), "depths": (1, 1, 1, 1), "spatial_dims": dims}
        group = ("group", {"num_groups": 2})
        makers: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
            "UNet, instance norm": (partial(nets.UNet, dims, 1, 2, (8, 16, 32), (2, 2), num_res_units=2), shape, tile),
            "UNet, group norm": (partial(nets.UNet, dims, 1, 2, (8, 16, 32), (2, 2), norm=group), shape, tile),
            "BasicUNet": (partial(nets.BasicUNet, dims, 1, 2, (8, 8, 16, 32, 32, 8)), long, tile_long),
            "DynUNet": (
                partial(nets.DynUNet, dims, 1, 2, kernels, strides, strides[1:], filters=[8, 16, 32]),
                shape,
                tile,
            ),
            "SegResNet": (partial(nets.SegResNet, dims, 8, 1, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1)), shape, tile),
            "AttentionUnet": (partial(nets.AttentionUnet, dims, 1, 2, (8, 16, 32), (2, 2)), shape, tile),
            "SwinUNETR": (
                partial(nets.SwinUNETR, 1, 2, **swin),
                (1, *[32] * (dims - 1), 320),
                (*[32] * (dims - 1), 64),
            ),
        }
        settings |= {f"MONAI {name}, {dims}-D": Setting(*each) for name, each in makers.items()}
    return settings


def nnunet_networks() -> dict[str, Setting]:
    """Return nnU-Net's plain U-Net, in two and three dimensions."""

    def plain(dims: int) -> nn.Module:
        from dynamic_network_architectures.architectures.unet import PlainConvUNet

        convolution, norm = ((nn.Conv2d, nn.InstanceNorm2d), (nn.Conv3d, nn.InstanceNorm3d))[dims - 2]
        block = {"conv_bias": True, "norm_op": norm, "norm_op_kwargs": {"eps": 1e-5, "affine": True}}
        stages = (3, (8, 16, 32), convolution, 3, (1, 2, 2), 2, 2, 2)
        return PlainConvUNet(1, *stages, **block, nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True})

    return {
        "nnU-Net PlainConvUNet, 2-D": Setting(partial(plain, 2), IN_2D, TILE_2D),
        "nnU-Net PlainConvUNet, 3-D": Setting(partial(plain, 3), IN_3D, TILE_3D),
    }


def diffusers_networks() -> dict[str, Setting]:
    """Return both halves of the autoencoder of latent diffusion."""

    def autoencoder() -> nn.Module:
        from diffusers import AutoencoderKL

        kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        return AutoencoderKL(**kinds, block_out_channels=(16, 32), norm_num_groups=4)

    return {
        "diffusers AutoencoderKL, encode": Setting(lambda: Encode(autoencoder()), (3, 40, 172), (32, 32)),
        "diffusers AutoencoderKL, decode": Setting(lambda: Decode(autoencoder()), (4, 20, 87), (16, 16)),
    }


def smp_networks() -> dict[str, Setting]:
    """Return networks of segmentation_models_pytorch."""
    import segmentation_models_pytorch as smp

    def make(name: str, encoder: str) -> nn.Module:
        return getattr(smp, name)(encoder, encoder_weights=None, in_channels=1, classes=2)

    pairs = [("Unet", "timm-efficientnet-b0"), ("Unet", "mit_b0")]
    names = ("Unet", "UnetPlusPlus", "Linknet", "MAnet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus")
    pairs += [(name, "resnet18") for name in (*names, "UPerNet", "Segformer")]
    settings = {
        f"smp {name}, {encoder}": Setting(partial(make, name, encoder), LONG_2D, TILE_LONG_2D)
        for name, encoder in pairs
    }
    # It takes multiples of 128.
    settings["smp PAN, resnet18"] = Setting(partial(make, "PAN", "resnet18"), (1, 128, 1280), (128, 128))
    return settings


def care_networks() -> dict[str, Setting]:
    """Return CARE's U-Net with attention inserted behind its bottom, and but for softmax behind its first block too."""
    from farfield.insertion import insert
    from farfield_papers.models import unet_care

    def make(operator: str, dims: int) -> nn.Module:
        net = unet_care(spatial_dims=dims, first_channels=8)
        attention = partial(GridAttention, operator=operator, project="qkvo", heads=2, residual=True)
        insert(
            net,
            ["bottom"] if operator == "softmax" else ["encoder.0", "bottom"],
            attention,
            example=torch.zeros(1, 1, *[16] * dims),
        )
        return net

    return {
        f"CARE U-Net with {operator}, {dims}-D": Setting(partial(make, operator, dims), shape, tile)
        for dims, shape, tile in ((2, IN_2D, TILE_2D), (3, IN_3D, TILE_3D))
        for operator in ("kronecker_qkv", "factorized_gaussian", "softmax")
    }


def settle(net: nn.Module) -> nn.Module:
    """Set what is 0 or 1 at the start as training leaves it, and return the network in eval mode.

    Norms get random scales, offsets and running statistics; weights of zeros, as those of inserted attention, random
    ones.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in net.modules():
            for name in ("weight", "bias", "running_mean", "running_var"):
                tensor = getattr(module, name, None)
                if isinstance(tensor, Tensor) and tensor.dim() == 1:
                    tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
        for weight in net.parameters():
            if weight.dim() > 1 and not weight.any():
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight[0].numel() ** 0.5)
    return net.eval()


def volume(shape: tuple[int, ...]) -> Tensor:
    """Return a volume whose mean and deviation change along the last axis."""
    ramp = torch.linspace(0, 3, shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * (1 + ramp) + ramp


def slide(net: nn.Module, grid: Tensor, plan: StreamingPlan) -> Tensor:
    """Run a network on each tile with the halo of the plan, and keep the tile's own positions."""
    result = torch.empty(plan.output_shape[1:])
    halo = plan.halo
    # Resizing with align_corners steps by another ratio, and tiles of it alone are near it.
    ratios = [length / own for length, own in zip(plan.output_shape[-len(plan.size) :], plan.size, strict=True)]
    # The strides divide the tile and the volume.
    multiples = list(map(math.gcd, plan.tile, plan.size))
    for core in plan.cores:
        pairs = zip(halo.around(core, plan.size), multiples, strict=True)
        read = [(start // multiple * multiple, -(-stop // multiple) * multiple) for (start, stop), multiple in pairs]
        part = net(grid[(None, ..., *(slice(start, stop) for start, stop in read))])[0]
        own, first = (
            [(round(start * ratio), round(stop * ratio)) for (start, stop), ratio in zip(region, ratios, strict=True)]
            for region in (core, read)
        )
        inside = (slice(start - begin, stop - begin) for (start, stop), (begin, _) in zip(own, first, strict=True))
        result[(..., *(slice(start, stop) for start, stop in own))] = part[(..., *inside)]
    return result


def relative(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest number."""
    return float((result - expected).abs().max() / expected.abs().max())


def measure(setting: Setting) -> dict[str, Any]:
    """Run one network in tiles, alone in each tile, and whole."""
    torch.manual_seed(0)
    net, grid = settle(setting.build()), volume(setting.shape)
    try:
        plan = plan_whole(net, grid.shape, tile=setting.tile)
    except (ValueError, TypeError) as error:
        return {"refused": str(error)}
    with torch.no_grad():
        expected = net(grid[None])[0]
        alone = slide(net, grid, plan)
    streamed = predict_whole(net, grid, tile=setting.tile, quiet=True)
    return {
        "layers": len({path for each in plan.passes for path in each.summarizes}),
        "tiles": len(plan.cores),
        "passes": len(plan.passes),
        "work": plan.recomputed,
        "streamed": relative(streamed, expected),
        "alone": relative(alone, expected),
    }


def main() -> None:
    """Measure the networks, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", nargs="+", help="names, of --sweep also their beginnings; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument("--sweep", action="store_true", help="judge networks of other libraries: right, refused, wrong")
    arguments = parser.parse_args()
    if arguments.sweep:
        from streamed_sweep import sweep

        sweep(arguments.network, arguments.json)
        return
    every, results = settings(), {}
    print("| network | layers that need the whole | passes | work | tiles | independent tiles |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in arguments.network or every:
        result = results[name] = measure(every[name])
        if "refused" in result:
            print(f"| {name} | refused: {result['refused'].split('; fix')[0]} | | | | |", flush=True)
            continue
        numbers = f"{result['layers']} | {result['passes']} | {result['work']:.1f}"
        print(f"| {name} | {numbers} | {result['streamed']:.0e} | {result['alone']:.0e} |", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
