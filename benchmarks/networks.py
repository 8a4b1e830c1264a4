"""Networks of other libraries, one of every family, small and with random weights, each with an example input."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import timm
import torch
import torchvision
from torch import nn

# Parts of names that mark a network as small, the smallest first.
SMALL = ("test_", "_zepto", "_atto", "_femto", "_pico", "_nano", "xxtiny", "_xxs", "_xs", "_tiny", "_s0", "_t0", "_m0")
SMALL += ("_n_", "_t_", "_b0", "18", "_small", "_s", "lite", "_x0_5", "1_0", "_400mf", "11", "121", "50")


class Network(NamedTuple):
    """A network by its name, functions that build it and an example input, and the checks that it is for."""

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[nn.Module], Any]
    checks: tuple[str, ...] = ("insert", "replace")


def networks() -> Iterator[Network]:
    """Yield every network of the sweep; nothing is built yet."""
    yield from timm_networks()
    yield from torchvision_networks()
    yield from smp_networks()
    yield from hugging_face_networks()
    yield from hugging_face_bases()


def smallest(names: list[str]) -> str:
    """Return the network of a family that is the smallest by its name."""
    return min(names, key=lambda name: (next((n for n, mark in enumerate(SMALL) if mark in name), 99), len(name), name))


# timm's networks for images larger than the first get images of the second; elsewhere the third is tried first.
LARGEST, SIDE, LEAST = 256, 224, 128
# The module of farfield's networks, which `register_timm` adds to timm's.
CATALOG = "farfield_papers.models.catalog"


# ---- timm ------------------------------------------------------------------------------------------------------------
def timm_networks() -> Iterator[Network]:
    """Yield one network of each module of timm that registers networks; `timm_network` gives others by name."""
    for family in timm.list_modules():
        names = [name for name in timm.list_models(module=family) if timm.model_entrypoint(name).__module__ != CATALOG]
        if names:
            yield timm_network(smallest(names))


def timm_network(name: str) -> Network:
    """Return a network of timm by its name; one of a fixed size above `LARGEST` is built for `SIDE`."""
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    is_large = config is not None and config.fixed_input_size and config.input_size[-1] > LARGEST
    options = {"img_size": SIDE} if is_large else {}
    return Network(f"timm/{name}", partial(timm.create_model, name, pretrained=False, **options), timm_example)


def timm_example(model: nn.Module) -> torch.Tensor:
    """Make an image of the network's input size, or of `SIDE` if that is large, such as 1,024²."""
    channels, *size = model.default_cfg["input_size"]
    return torch.rand(1, channels, *(side if side <= LARGEST else SIDE for side in size))


# ---- torchvision -----------------------------------------------------------------------------------------------------
def torchvision_networks() -> Iterator[Network]:
    """Yield one network of each module of torchvision: for images, videos, segmentation and detection."""
    families: dict[str, list[str]] = {}
    for name in torchvision.models.list_models():
        family = torchvision.models.get_model_builder(name).__module__
        if not family.startswith(("torchvision.models.quantization", "torchvision.models.optical_flow")):
            families.setdefault(family, []).append(name)
    for family, names in families.items():
        yield torchvision_network(smallest(names), family)


def torchvision_network(name: str, family: str) -> Network:
    """Return a network of torchvision by its name."""
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(torchvision.models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None
    if ".detection." in family:
        example: Any = [torch.rand(3, 128, 128)]
        options |= {} if name.startswith("ssd") else {"min_size": 128, "max_size": 128}
        # With random weights no proposal is better than another, and each costs time.
        few = "rpn_post_nms_top_n_test" if "rcnn" in name else "topk_candidates"
        options |= {few: 20}
    elif ".video." in family:
        # Two of them accept only one size, and one accepts no small sizes.
        size = (16, 224, 224) if name.startswith(("mvit", "swin", "s3d")) else (8, 64, 64)
        example = torch.rand(1, 3, *size)
    else:
        example = torch.rand(1, 3, 299, 299) if name.startswith("inception") else torch.rand(1, 3, 224, 224)
    return Network(
        f"torchvision/{name}", partial(torchvision.models.get_model, name, **options), partial(given, example)
    )


def given(example: Any, model: nn.Module) -> Any:
    """Return an example that was made before the network."""
    return example


# ---- segmentation_models_pytorch -------------------------------------------------------------------------------------
def smp_networks() -> Iterator[Network]:
    """Yield each architecture of segmentation_models_pytorch, and U-Net on encoders of different structures."""
    smp = importlib.import_module("segmentation_models_pytorch")
    pairs = [(name, "mit_b0" if name == "segformer" else "resnet18") for name in smp.MODEL_ARCHITECTURES_MAPPING]
    pairs += [
        ("unet", name) for name in ("mobilenet_v2", "densenet121", "vgg11", "efficientnet-b0", "tu-convnext_atto")
    ]
    for name, encoder in pairs:
        build = partial(smp.create_model, name, encoder_name=encoder, encoder_weights=None)
        if name == "dpt":
            build, encoder = partial(smp.DPT, "tu-vit_tiny_patch16_224", encoder_weights=None), "vit_tiny"
        size = 224 if name == "dpt" else 128
        yield Network(f"smp/{name}-{encoder}", build, partial(given, torch.rand(1, 3, size, size)))


# ---- Hugging Face ----------------------------------------------------------------------------------------------------
HEADS = ("IMAGE_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "OBJECT_DETECTION", "BACKBONE")
HEADS += ("UNIVERSAL_SEGMENTATION", "VIDEO_CLASSIFICATION")
# Numbers that make a configuration small, where it has them, and further ones with which some models cannot be built.
TINY = {"num_hidden_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_labels": 3, "num_queries": 5}
TINY |= {"n_layer": 2, "n_layers": 2, "num_layers": 2}
TINIER = {"hidden_size": 64, "d_model": 64, "dim": 64, "n_embd": 64, "embed_dim": 64, "intermediate_size": 96}
TINIER |= {"num_attention_heads": 4, "n_heads": 4, "n_head": 4, "encoder_attention_heads": 4, "num_heads": 4}
TINIER |= {"decoder_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "encoder_ffn_dim": 96}
TINIER |= {"decoder_ffn_dim": 96, "vocab_size": 200}
TINIER |= {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0, "use_cache": False}
# Models with more weights are not built.
MOST_WEIGHTS = 300_000_000
TEXT, PIXELS = "input_ids", "pixel_values"


def hugging_face_networks() -> Iterator[Network]:
    """Yield each vision model of transformers with each of its heads, small."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    kinds: dict[str, str] = {}
    for head in HEADS:
        for kind, model in getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            # Some kinds have several models, and some models several kinds.
            kinds.setdefault(model if isinstance(model, str) else model[0], kind)
    for name, kind in kinds.items():
        yield Network(f"hf/{name}", partial(hugging_face_model, kind, name), hugging_face_example)


def hugging_face_model(kind: str, name: str) -> nn.Module:
    """Build a model of transformers, as small as can be built and run."""
    transformers = importlib.import_module("transformers")
    kind_of_model, problems = getattr(transformers, name), []
    # Some configurations name layers by their index, and then need all layers.
    for numbers, side in itertools.product((TINY | TINIER, TINY, TINIER, {}), (LEAST, SIDE)):
        config = small_config(kind, numbers, side)
        if name.endswith("Backbone") and hasattr(config, "stage_names"):
            config.out_features = list(config.stage_names[1:])
        try:
            with torch.device("meta"):
                size = sum(weight.numel() for weight in kind_of_model(config).parameters())
            if size < MOST_WEIGHTS:
                model = kind_of_model(config)
                with torch.no_grad():
                    model.eval()(**hugging_face_words(model))
                return model
            problems.append(f"{size:,} weights")
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, AssertionError) as error:
            problems.append(f"{type(error).__name__}: {error}")
    raise ValueError(f"no configuration of it is small and runs: {'; '.join(problems)}")


def small_config(kind: str, numbers: dict[str, int], side: int) -> Any:
    """Return the configuration of a kind of model and of its parts with these numbers, for images of at most `side`."""
    transformers = importlib.import_module("transformers")
    config = transformers.AutoConfig.for_model(kind)
    parts = [config, *(part for part in vars(config).values() if isinstance(part, transformers.PretrainedConfig))]
    for part in parts:
        for option, value in numbers.items():
            if isinstance(getattr(part, option, None), int):
                setattr(part, option, value)
        for option, value in vars(part).items():
            if isinstance(value, tuple):  # which some models add to lists
                setattr(part, option, list(value))
        if numbers and isinstance(getattr(part, "depths", None), list | tuple):
            part.depths = [1] * len(part.depths)
        if isinstance(getattr(part, "image_size", None), int) and part.image_size > side:
            part.image_size = side
    return config


def hugging_face_example(model: nn.Module) -> dict[str, torch.Tensor]:
    """Make pixels of the configuration's size."""
    config = model.config
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or LEAST
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = getattr(vision, "num_frames", None)
    shape = (1, *([frames] if frames else []), getattr(vision, "num_channels", 3), height, width)
    return {"pixel_values": torch.rand(shape)}


# ---- Hugging Face, without heads -------------------------------------------------------------------------------------
def hugging_face_bases() -> Iterator[Network]:
    """Yield each model of transformers without a head, with text or pixels as input, for the check "replace" alone."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    # Some are already among the models with heads.
    seen = {network.name.removeprefix("hf/") for network in hugging_face_networks()}
    for kind, names in auto.MODEL_MAPPING_NAMES.items():
        name = names if isinstance(names, str) else names[0]
        if name not in seen:
            seen.add(name)
            yield Network(f"hf/{name}", partial(hugging_face_model, kind, name), hugging_face_words, ("replace",))


def hugging_face_words(model: nn.Module) -> dict[str, torch.Tensor]:
    """Make words, some of them padding, or pixels."""
    if model.main_input_name == PIXELS:
        return hugging_face_example(model)
    if model.main_input_name != TEXT:
        raise ValueError(f"its input is {model.main_input_name}")
    words = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    valid = torch.ones(2, 12, dtype=torch.long)
    valid[0, 9:] = 0
    given = {TEXT: words, "attention_mask": valid}
    decoder = {f"decoder_{name}": each for name, each in given.items()}
    return given | decoder if model.config.is_encoder_decoder else given
