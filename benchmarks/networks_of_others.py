"""Networks of other libraries, small and with random weights: how each is built, and a volume and tiles for it.

benchmarks/streamed_networks.py --sweep runs them in tiles. Nothing is downloaded. Where a network returns more than a
grid, or takes more than one, a small module around it does what its users do: `Tokens` puts the tokens of a transformer
back where they came from, `Output` takes one of several.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Network(NamedTuple):
    """A network of a library, and a volume with channels that it takes.

    Attributes:
        build: Makes the network.
        shape: Shape of the volume, with channels.
        tile: Size of the tiles.
        reduce: As that of `predict_whole`.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tile: tuple[int, ...]
    reduce: Any = None


# Sizes that the strides divide; the last tile is smaller.
IMAGE, TILE = (3, 96, 160), (64, 64)
SQUARE = (3, 128, 128)
STACK, TILE_3D = (1, 32, 32, 80), (32, 32, 32)
VIDEO, TILE_VIDEO = (3, 9, 32, 64), (9, 16, 32)


class Item(nn.Module):
    """A network that returns several grids, of which one is taken by its place."""

    def __init__(self, network: nn.Module, place: int) -> None:
        super().__init__()
        self.network, self.place = network, place

    def forward(self, grid: Tensor) -> Tensor:
        """Return one of the grids."""
        return self.network(grid)[self.place]


class Output(nn.Module):
    """A network that returns an object, of which one grid is taken by its name, and by its place if there are several.

    `channel` puts an axis of one channel where the grid has none.
    """

    def __init__(self, network: nn.Module, name: str, place: int | None = None, channel: bool = False) -> None:
        super().__init__()
        self.network, self.name, self.place, self.channel = network, name, place, channel

    def forward(self, grid: Tensor) -> Tensor:
        """Return one of the grids."""
        output = getattr(self.network(grid), self.name)
        output = output if self.place is None else output[self.place]
        return output[:, None] if self.channel else output


class Tokens(nn.Module):
    """A transformer whose tokens, but for the first, are put back as the grid of patches that they are."""

    def __init__(self, network: nn.Module, patch: int | tuple[int, ...], skip: int = 0) -> None:
        super().__init__()
        self.network, self.patch, self.skip = network, patch, skip

    def forward(self, grid: Tensor) -> Tensor:
        """Return the grid `(b, c, h / patch, w / patch)` of tokens."""
        tokens = self.network(grid)
        tokens = getattr(tokens, "last_hidden_state", tokens)
        tokens = tokens[0] if isinstance(tokens, tuple) else tokens
        size = grid.shape[2:]
        patch = (self.patch,) * len(size) if isinstance(self.patch, int) else self.patch
        lengths = [length // own for length, own in zip(size, patch, strict=True)]
        return tokens[:, self.skip :].transpose(1, 2).unflatten(2, lengths)


class ChannelsFirst(nn.Module):
    """A network from channels first to channels last, with the channels first again."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, grid: Tensor) -> Tensor:
        """Return the grid with its channels first."""
        return self.network(grid).movedim(-1, 1)


class Sound(nn.Module):
    """A network from sound `(b, n)` to `(b, frames, c)`, as one from `(b, 1, n)` to `(b, c, frames)`."""

    def __init__(self, network: nn.Module, name: str = "last_hidden_state") -> None:
        super().__init__()
        self.network, self.name = network, name

    def forward(self, sound: Tensor) -> Tensor:
        """Return the frames, channels first."""
        return getattr(self.network(sound[:, 0]), self.name).transpose(1, 2)


class Frames(Sound):
    """A network from a spectrogram `(b, mels, n)` to `(b, frames, c)`, with the channels of both first."""

    def forward(self, sound: Tensor) -> Tensor:
        """Return the frames, channels first."""
        return getattr(self.network(sound), self.name).transpose(1, 2)


class FramesLast(Sound):
    """A network from a spectrogram `(b, n, mels)` to `(b, frames, c)`, with the channels of both first."""

    def forward(self, sound: Tensor) -> Tensor:
        """Return the frames, channels first."""
        return getattr(self.network(sound.transpose(1, 2)), self.name).transpose(1, 2)


class Method(nn.Module):
    """A network of which another method than `forward` is called."""

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.network, self.name = network, name

    def forward(self, grid: Tensor) -> Any:
        """Return what the method returns."""
        return getattr(self.network, self.name)(grid)


class Encode(nn.Module):
    """The encoder of an autoencoder of diffusers, without the random draw."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, grid: Tensor) -> Tensor:
        """Return the mode of the latent distribution, or the latent grid where there is none."""
        encoded = self.autoencoder.encode(grid)
        for name in ("latents", "latent"):
            if hasattr(encoded, name):
                return getattr(encoded, name)
        return encoded.latent_dist.mode()


class Decode(nn.Module):
    """The decoder of an autoencoder of diffusers."""

    def __init__(self, autoencoder: nn.Module, **options: Any) -> None:
        super().__init__()
        self.autoencoder, self.options = autoencoder, options

    def forward(self, grid: Tensor) -> Tensor:
        """Return the decoded image."""
        return self.autoencoder.decode(grid, **self.options).sample


class Pair(nn.Module):
    """A network of two grids, which are the first and the second half of the channels, and one of its outputs."""

    def __init__(self, network: nn.Module, place: int) -> None:
        super().__init__()
        self.network, self.place = network, place

    def forward(self, grid: Tensor) -> Tensor:
        """Return one of the outputs."""
        return self.network(*grid.chunk(2, 1))[self.place]


class Timed(nn.Module):
    """A network of a grid and a time step, at step 5."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, grid: Tensor) -> Tensor:
        """Return the grid."""
        output = self.network(grid, torch.full((len(grid),), 5))
        return getattr(output, "sample", output)


class Detector(nn.Module):
    """A detector of torchvision, which takes a list of images; the boxes of what it finds in the first."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, grid: Tensor) -> Tensor:
        """Return the boxes."""
        return self.network(list(grid))[0]["boxes"]


# ---- torchvision -----------------------------------------------------------------------------------------------------
def torchvision_networks() -> Iterator[tuple[str, Network]]:
    """Yield one network of each family: classes, segmentation, videos, detection and optical flow."""
    models = importlib.import_module("torchvision.models")

    def make(name: str, wrap: Callable[[Any], nn.Module] = lambda net: net, **options: Any) -> nn.Module:
        without = {"weights": None} | ({"weights_backbone": None} if "backbone" in options else {})
        options.pop("backbone", None)
        return wrap(models.get_model(name, **without, **options))

    names = "alexnet convnext_tiny densenet121 efficientnet_b0 googlenet mnasnet0_5 mobilenet_v2 mobilenet_v3_small"
    names += " regnet_x_400mf resnet18 shufflenet_v2_x0_5 squeezenet1_1 vgg11 swin_t swin_v2_t"
    for name in names.split():
        yield name, Network(partial(make, name), IMAGE, TILE)
    yield "inception_v3", Network(partial(make, "inception_v3"), (3, 128, 160), TILE)
    yield "vit_b_32", Network(partial(make, "vit_b_32", image_size=128), SQUARE, TILE)
    yield "maxvit_t", Network(partial(make, "maxvit_t"), (3, 224, 224), (112, 112))
    for name in ("convnext_tiny", "mobilenet_v2", "efficientnet_b0", "densenet121"):
        yield f"{name}, features", Network(partial(make, name, lambda net: net.features), IMAGE, TILE)
    for name in ("swin_t", "swin_v2_t"):
        features = partial(make, name, lambda net: ChannelsFirst(net.features))
        yield f"{name}, features", Network(features, IMAGE, TILE)
    for name in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        yield name, Network(partial(make, name, backbone=True, num_classes=4), IMAGE, TILE)
    yield "r3d_18", Network(partial(make, "r3d_18"), (3, 8, 32, 48), (4, 16, 16))
    yield "s3d, features", Network(partial(make, "s3d", lambda net: net.features), (3, 16, 64, 96), (16, 32, 32))
    yield "swin3d_t", Network(partial(make, "swin3d_t"), (3, 8, 64, 96), (8, 32, 32))
    yield "raft_small", Network(partial(make, "raft_small", lambda net: Pair(net, -1)), (6, 128, 160), TILE)
    few: dict[str, dict[str, Any]] = {
        "fasterrcnn_mobilenet_v3_large_320_fpn": {"min_size": 96, "max_size": 160, "rpn_post_nms_top_n_test": 20},
        "retinanet_resnet50_fpn": {"min_size": 96, "max_size": 160, "topk_candidates": 20},
        "ssdlite320_mobilenet_v3_large": {"topk_candidates": 20},
    }
    for name, options in few.items():
        yield name, Network(partial(make, name, Detector, backbone=True, **options), IMAGE, TILE)


# ---- timm ------------------------------------------------------------------------------------------------------------
# Modules -> volumes and numbers of their networks: patches of 14 or 16, blocks of 8, many weights.
PATCHES: tuple[int, ...] = (3, 112, 224)
OTHERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    **dict.fromkeys(("vision_transformer", "deit", "eva"), (PATCHES, {"dynamic_img_size": True})),
    "deepseek_vit": (PATCHES, {"depth": 2}),
    "byoanet": ((3, 256, 256), {}),
}
FEATURES = """
    resnet18 convnext_atto efficientnet_lite0 mobilenetv3_small_050 regnetx_002 edgenext_xx_small mobilevit_xxs
    poolformer_s12 inception_next_atto repvit_m0_9 ghostnet_050 mobileone_s0 efficientvit_b0 fastvit_t8 hgnetv2_b0
    mambaout_femto starnet_s1 test_vit test_convnext pvt_v2_b0 rexnet_100 vovnet39a resnest14d skresnet18
    res2net50_26w_4s
"""


def timm_networks() -> Iterator[tuple[str, Network]]:
    """Yield one network of each module of timm, mostly with classes, and the last features of some."""
    timm = importlib.import_module("timm")
    from networks import CATALOG, smallest

    def make(name: str, **options: Any) -> nn.Module:
        return timm.create_model(name, pretrained=False, **options)

    for family in timm.list_modules():
        names = [name for name in timm.list_models(module=family) if timm.model_entrypoint(name).__module__ != CATALOG]
        if not names:
            continue
        name = smallest(names)
        config = timm.get_pretrained_cfg(name, allow_unregistered=True)
        options: dict[str, Any] = {}
        shape = IMAGE if config is None or not config.fixed_input_size else tuple(config.input_size)
        if shape[-1] > 256:
            shape, options = (3, 224, 224), {"img_size": 224}
        shape, options = OTHERS.get(family, (shape, options))
        yield name, Network(partial(make, name, **options), shape, TILE)
    for name in FEATURES.split():

        def last(name: str = name) -> nn.Module:
            features = Item(make(name, features_only=True), -1)
            return ChannelsFirst(features) if name.startswith("mambaout") else features

        yield f"{name}, features", Network(last, IMAGE, TILE)


# ---- segmentation_models_pytorch -------------------------------------------------------------------------------------
def smp_networks() -> Iterator[tuple[str, Network]]:
    """Yield each architecture of segmentation_models_pytorch, and U-Net on encoders of different structures."""
    smp = importlib.import_module("segmentation_models_pytorch")
    pairs = [(name, "mit_b0" if name == "segformer" else "resnet18") for name in smp.MODEL_ARCHITECTURES_MAPPING]
    encoders = "mobilenet_v2 densenet121 vgg11 efficientnet-b0 tu-convnext_atto mit_b0 mobileone_s0 se_resnet50"
    pairs += [("unet", name) for name in encoders.split()]
    for name, encoder in pairs:
        options: dict[str, Any] = {"encoder_name": encoder, "encoder_weights": None, "classes": 2}
        shape = (3, 128, 256) if name == "pan" else IMAGE
        if name == "dpt":
            options["encoder_name"] = encoder = "tu-vit_tiny_patch16_224"
            shape = (3, 224, 224)
        yield f"{name}, {encoder}", Network(partial(smp.create_model, name, **options), shape, TILE)


# ---- spandrel --------------------------------------------------------------------------------------------------------
def spandrel_networks() -> Iterator[tuple[str, Network]]:
    """Yield networks of spandrel, which restore images and make them larger."""
    windows = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "upsampler": "pixelshuffle"}
    windows |= {"img_size": 32, "upscale": 2}
    depth = {"embed_dim": 16, "depth": [2], "num_heads": [2], "img_size": 32, "upscale": 2}
    few = {"in_nc": 3, "out_nc": 3, "nc": [8, 8, 16, 16], "nb": 1}
    numbers: dict[str, dict[str, Any]] = {
        "ESRGAN": {"num_filters": 16, "num_blocks": 2},
        "Compact": {"num_feat": 16, "num_conv": 4},
        "RCAN": {"n_resgroups": 2, "n_resblocks": 2, "n_feats": 16},
        "SPAN": {"num_in_ch": 3, "num_out_ch": 3, "feature_channels": 16},
        "PLKSR": {"dim": 16, "n_blocks": 2},
        "NAFNet": {"width": 8, "enc_blk_nums": [1, 1], "dec_blk_nums": [1, 1]},
        "DRUNet": few,
        "FBCNN": few | {"nc": [8, 8, 16, 512]},
        "DnCNN": {"in_nc": 3, "out_nc": 3, "nc": 16, "nb": 4},
        "SwinIR": windows,
        "Swin2SR": windows,
        "HAT": windows | {"squeeze_factor": 4},
        "DAT": depth | {"embed_dim": 32},
        "RGT": depth | {"embed_dim": 32},
        "OmniSR": {"num_feat": 16},
        "SCUNet": {"config": [2] * 7, "dim": 64},
        "Uformer": {"img_size": 128, "embed_dim": 8, "depths": [1] * 9, "num_heads": [1] * 9},
        "MixDehazeNet": {"embed_dims": [8, 16, 32, 16, 8]},
    }

    def make(name: str) -> nn.Module:
        module = importlib.import_module(f"spandrel.architectures.{name}")
        network = getattr(module, name)(**numbers[name])
        return Item(network, 0) if name == "FBCNN" else network  # beside a number of each image

    for name in numbers:
        shape = SQUARE if name in ("SCUNet", "Uformer", "MixDehazeNet") else (3, 32, 48)
        yield name, Network(partial(make, name), shape, TILE if shape == SQUARE else (16, 16))
