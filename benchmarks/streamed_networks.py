"""Run networks of other libraries in tiles and compare with the whole: exact, or refused with the reason.

    python benchmarks/streamed_networks.py
    python benchmarks/streamed_networks.py --network "MONAI UNet" --json streamed.json

Networks have random weights, norms random scales and offsets. `tiles` is the largest difference between predict_whole
and the network on the whole volume, relative to the largest number; `independent tiles` is that of a sliding window
with the same tiles and overlap, in which each tile has statistics of its own. `work` is the MACs of all passes relative
to those of the network on the whole volume: small volumes have large halos.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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


IN_3D, IN_2D, TILE_3D, TILE_2D = (1, 32, 48, 80), (1, 96, 176), (32, 32, 32), (64, 64)
# Encoders of ImageNet have receptive fields of hundreds of positions.
LONG, TILE_LONG = (1, 64, 1280), (64, 128)


class Encode(nn.Module):
    """The encoder of an autoencoder of diffusers, without the random draw."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, grid: Tensor) -> Tensor:
        """Return the mode of the latent distribution."""
        return self.autoencoder.encode(grid).latent_dist.mode()


class Decode(nn.Module):
    """The decoder of an autoencoder of diffusers."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, grid: Tensor) -> Tensor:
        """Return the decoded image."""
        return self.autoencoder.decode(grid).sample


def settings() -> dict[str, Setting]:
    """Return the networks by name."""
    import segmentation_models_pytorch as smp
    from diffusers import AutoencoderKL
    from monai.networks import nets

    def unet(dims: int, norm: Any) -> nn.Module:
        return nets.UNet(dims, 1, 2, (8, 16, 32), (2, 2), num_res_units=2, norm=norm)

    def dynunet() -> nn.Module:
        return nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[8, 16, 32])

    def plain(name: str, encoder: str) -> nn.Module:
        return getattr(smp, name)(encoder, encoder_weights=None, in_channels=1, classes=2)

    def autoencoder() -> nn.Module:
        return AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(16, 32),
            norm_num_groups=4,
        )

    return {
        "MONAI UNet, 3-D, instance norm": Setting(lambda: unet(3, "instance"), IN_3D, TILE_3D),
        "MONAI UNet, 2-D, group norm": Setting(lambda: unet(2, ("group", {"num_groups": 2})), IN_2D, TILE_2D),
        "MONAI BasicUNet, 3-D": Setting(
            lambda: nets.BasicUNet(3, 1, 2, (8, 8, 16, 32, 32, 8)), (1, 16, 16, 352), (16, 16, 32)
        ),
        "MONAI DynUNet, 3-D": Setting(dynunet, IN_3D, TILE_3D),
        "MONAI SegResNet, 3-D": Setting(
            lambda: nets.SegResNet(3, 8, 1, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1)), IN_3D, TILE_3D
        ),
        "MONAI AttentionUnet, 2-D": Setting(lambda: nets.AttentionUnet(2, 1, 2, (8, 16, 32), (2, 2)), IN_2D, TILE_2D),
        "diffusers AutoencoderKL, encode": Setting(lambda: Encode(autoencoder()), (3, 40, 176), (32, 32)),
        "diffusers AutoencoderKL, decode": Setting(lambda: Decode(autoencoder()), (4, 20, 88), (16, 16)),
        "smp Unet, efficientnet-b0": Setting(lambda: plain("Unet", "timm-efficientnet-b0"), LONG, TILE_LONG),
        "smp Unet, resnet18": Setting(lambda: plain("Unet", "resnet18"), LONG, TILE_LONG),
        "smp DeepLabV3Plus, resnet18": Setting(lambda: plain("DeepLabV3Plus", "resnet18"), LONG, TILE_LONG),
        "smp FPN, resnet18": Setting(lambda: plain("FPN", "resnet18"), LONG, TILE_LONG),
        "smp PSPNet, resnet18": Setting(lambda: plain("PSPNet", "resnet18"), LONG, TILE_LONG),
    }


def settle(net: nn.Module) -> nn.Module:
    """Give norms random scales, offsets and running statistics, as after training; return the network in eval mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in net.modules():
            for name in ("weight", "bias", "running_mean", "running_var"):
                tensor = getattr(module, name, None)
                if isinstance(tensor, Tensor) and tensor.dim() == 1:
                    tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
    return net.eval()


def volume(shape: tuple[int, ...]) -> Tensor:
    """Return a volume whose mean and deviation change along the last axis."""
    ramp = torch.linspace(0, 3, shape[-1])
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * (1 + ramp) + ramp


def slide(net: nn.Module, grid: Tensor, plan: StreamingPlan) -> Tensor:
    """Run a network on each tile with the halo of the last pass, and keep the tile's own positions."""
    result = torch.empty(0)
    for core in plan.cores:
        read = plan.passes[-1].halo.around(core, plan.size)
        part = net(grid[(None, ..., *(slice(start, stop) for start, stop in read))])[0]
        if not len(result):
            result = torch.empty(part.shape[0], *plan.output.grid.size)
        own, first = (plan.output.grid.part(region, plan.size) for region in (core, read))
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
        "layers": len(plan.calls),
        "tiles": len(plan.cores),
        "passes": len(plan.passes),
        "work": plan.recomputed,
        "streamed": relative(streamed, expected),
        "alone": relative(alone, expected),
    }


def main() -> None:
    """Measure the networks, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", help="may be repeated; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    arguments = parser.parse_args()
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
