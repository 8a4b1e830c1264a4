"""Parameters that were made without memory or by another library get the initial values of the module."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from farfield import models, ops
from farfield.models.bert import WordHead
from farfield.models.gan import ConditionalNorm, GatedAttention
from farfield.models.unet_parts import PreActivated
from farfield.models.video import NonLocalBlock
from farfield.nn import AttentionBlock, GridAttention, SqueezeExcite, TransformerLayer
from farfield.nn.norm import CoefficientNorm, norm_of

RESIDUAL = {"project": "qkvo", "residual": True}
NORMED = [name for name, entry in ops.OPERATORS.items() if norm_of(entry)]
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{f"norm of {name}": lambda name=name: CoefficientNorm(ops.OPERATORS[name], 2, 8) for name in NORMED},
    "siamese": lambda: GridAttention(8, "siamese", heads=2, project="qvo", residual=True, coefficient_norm=True),
    "residual": lambda: GridAttention(8, "kronecker_qkv", **RESIDUAL, coefficient_norm="columns"),
    "block": lambda: AttentionBlock(8, 8, "kronecker_qkv"),
    "squeeze excite": lambda: SqueezeExcite(8),
    "transformer": lambda: TransformerLayer(8, "siamese", heads=2),
    "gated": lambda: GatedAttention(16, "factorized"),
    "conditional norm": lambda: ConditionalNorm(8, 3),
    "pre-activated": lambda: PreActivated(GridAttention(8, "averaged", project="qkvo")),
    "non-local": lambda: NonLocalBlock(8, "factorized"),
    "words": lambda: WordHead(8, 20),
}
SETUP = models.Setup(channels=16, frozen=False, shorter_side=64, longer_side=96)
BERTS = ("bert_base", "bert_large", "bert_small")
NARROW = {"operator": "siamese", "first_channels": 8}
SMALL: dict[str, dict[str, object]] = {
    "deeplab_v2": {"backbone": "resnet50", "output": "siamese", "residual": True},
    "deeplab_compact": {"width": 0.25},
    "unet_care": NARROW,
    "unet_residual": NARROW,
    "unet_projection": {"operator": "averaged", "first_channels": 8},
    "psmnet_stacked": NARROW,
    "psmnet_basic": NARROW,
    "sagan": {"operator": "siamese", "side": 32, "attention_at": 8, "generator_channels": 8, "num_classes": 3},
    **{name: {"operator": "siamese", "vocabulary": 500, "channels": 64, "heads": 4, "layers": 2} for name in BERTS},
}
# Parts of torchvision, which initializes them where it builds them only; they are made with weights from a file.
TORCHVISION = ("mask_rcnn", "faster_rcnn", "video_resnet")
NETWORKS = [name for name in models.MODELS if name not in TORCHVISION]


def build(name: str) -> nn.Module:
    options = SMALL.get(name, {"width": 0.25, "num_classes": 10} if name in models.VARIANTS else {})
    return models.Bert(name, **options) if name in BERTS else models.MODELS[name](**options)


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    """A module from the meta device, with memory that holds NaN, or the largest whole number."""
    with torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
    return module


def reset(module: nn.Module) -> nn.Module:
    """Reset every module, the innermost first, so that those around them have the last word."""
    for part in reversed(list(module.modules())):
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return module


def assert_initialized(module: nn.Module, fresh: nn.Module) -> None:
    """Constants are equal; drawn tensors have the spread of the drawn ones of a fresh module."""
    own, expected = module.state_dict(), fresh.state_dict()
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        found, wanted = own[name].double(), tensor.double()
        assert found.isfinite().all(), name
        if wanted.numel() == 1 or bool((wanted == wanted.flatten()[0]).all()):
            assert torch.equal(found, wanted), name
            continue
        # The relative error of the root mean square of n numbers is below 1/√(2n), for a uniform one below 0.45/√n.
        margin = 6 / math.sqrt(2 * wanted.numel())
        ratio = float(found.square().mean().sqrt() / wanted.square().mean().sqrt())
        assert margin > 0.5 or abs(math.log(ratio)) < 2 * margin, (name, ratio)


@pytest.mark.parametrize("name", MODULES)
def test_modules_from_the_meta_device(name: str) -> None:
    torch.manual_seed(0)
    fresh = MODULES[name]()
    if name != "gated":  # spectral norm is torch's, and is drawn by the whole networks
        assert_initialized(reset(empty(MODULES[name])), fresh)
    else:
        assert float(reset(empty(MODULES[name])).state_dict()["gate"]) == 0.0


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_from_the_meta_device(name: str) -> None:
    torch.manual_seed(0)
    assert_initialized(reset(empty(lambda: build(name))), build(name))


@pytest.mark.parametrize("name", NETWORKS)
def test_no_module_stays_as_it_was_allocated(name: str) -> None:
    """As FSDP and Lightning: the outermost first, and only what has parameters or buffers of its own."""
    module = empty(lambda: build(name))
    for path, part in module.named_modules():
        direct = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not direct or type(part).__module__.startswith("torch.nn.utils.parametriz"):
            continue
        assert hasattr(part, "reset_parameters"), f"{path} ({type(part).__name__})"
        part.reset_parameters()
        assert all(tensor.isfinite().all() for tensor in direct), path


class _Scaled(GridAttention):
    """An attention with a parameter more."""

    def __init__(self) -> None:
        super().__init__(8, "siamese_local")
        self.gamma = nn.Parameter(torch.full((8,), 3.0))
        self.mixing = nn.Parameter(torch.full((8, 8), 3.0))


def test_only_its_own_parameters_are_drawn() -> None:
    attention = _Scaled()
    before = attention.weight.clone()
    attention.reset_parameters()
    assert not torch.equal(attention.weight, before)
    assert bool((attention.gamma == 3).all() and (attention.mixing == 3).all())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_weight_in_parts_stays() -> None:
    attention = nn.utils.weight_norm(GridAttention(8, "siamese_local"))
    parts = [part.clone() for part in attention.parameters(recurse=False)]
    attention.reset_parameters()
    assert all(map(torch.equal, parts, attention.parameters(recurse=False)))
