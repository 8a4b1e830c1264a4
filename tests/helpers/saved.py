"""Networks and modules as version 0.1 saved them: configurations, and what they gave for weights drawn again.

    python tests/helpers/saved.py    # writes the files of cases that have none; those there are stay as they are

Weights, buffers and inputs are drawn from the bits of a counter (Philox), which are the same with every library and on
every processor, so that the files hold configurations and outputs alone. Outputs are of float64.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MODELS = Path(__file__).parents[1] / "models" / "saved"
MODULES = Path(__file__).parents[1] / "nn" / "saved"
# So many numbers of each output are kept, evenly spread.
KEPT = 64


# ---- drawing ---------------------------------------------------------------------------------------------------------
def uniform(name: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) that the name decides, with 24 bits each."""
    count = int(np.prod(shape, dtype=np.int64))
    bits = np.random.Philox(key=zlib.crc32(name.encode())).random_raw((count + 1) // 2)
    halves = np.asarray(bits, dtype="<u8").view("<u4")[:count] >> 8
    return torch.as_tensor(halves.astype(np.float32) / np.float32(2**24)).reshape(shape)


def drawn(name: str, like: Tensor) -> Tensor:
    """What a weight or buffer of a state dict holds."""
    if not like.is_floating_point():
        return torch.ones(like.shape, dtype=like.dtype)
    numbers = uniform(name, tuple(like.shape))
    if like.dim() > 1:
        return (2 * numbers - 1) * (3 * like.shape[0] / like.numel()) ** 0.5
    return 0.5 + numbers if name.endswith(("running_var", "weight", "gate")) else numbers - 0.5


def draw_state(module: nn.Module) -> dict[str, Tensor]:
    """A state for a module."""
    state = {name: drawn(name, tensor) for name, tensor in module.state_dict().items()}
    for name, weight in state.items():
        path = name.removesuffix(".original")
        if path != name and f"{path}.0._u" in state:
            # Spectral norm divides by uᵀ W v, which these make the length of Wᵀ u.
            matrix = weight.double().flatten(1)
            ones = torch.full((len(matrix),), len(matrix) ** -0.5, dtype=torch.float64)
            towards = ones @ matrix
            state[f"{path}.0._u"], state[f"{path}.0._v"] = ones.float(), (towards / towards.norm()).float()
    return state


def normal(name: str, *shape: int) -> Tensor:
    """An input of float64 about 0, with a spread of 1."""
    return (uniform(name, shape).double() - 0.5) * 12**0.5


# ---- running ---------------------------------------------------------------------------------------------------------
def image(*size: int, batch: int = 2) -> Callable[[nn.Module], Any]:
    """A network of images or volumes."""
    channels = {"unet": 1}

    def run(net: Any) -> Any:
        return net(normal("input", batch, channels.get(net.config["model"].partition("_")[0], 3), *size))

    return run


def pair(net: nn.Module) -> Any:
    """A stereo network."""
    return net(normal("left", 1, 3, 64, 96), normal("right", 1, 3, 64, 96))


def adversaries(net: Any) -> Any:
    """A generator, and what its discriminator says."""
    labels = torch.tensor([1, 0]) if net.config["num_classes"] else None
    made = net.generator(normal("noise", 2, net.config["noise_channels"]), labels)
    return [made, net.discriminator(made, labels)]


def words(net: Any) -> Any:
    """A language model, on two texts, one of them padded."""
    tokens = (uniform("words", (2, 12)) * net.config["vocabulary"]).long()
    valid = torch.arange(12) < torch.tensor([[12], [9]])
    return net(tokens, mask=valid)


def photograph(net: Any) -> Any:
    """A detector."""
    return net([uniform("input", (3, 96, 128)).double()])


def outputs(value: Any) -> list[Tensor]:
    """The tensors of an output, those of dictionaries by their names."""
    if isinstance(value, Tensor):
        return [value]
    parts = [value[name] for name in sorted(value)] if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in outputs(part)]


def shortened(value: Tensor) -> np.ndarray:
    """The sum, the norm, and some numbers of an output, in float64."""
    flat = value.detach().double().flatten()
    step = max(1, len(flat) // KEPT)
    return torch.cat([torch.stack([flat.sum(), flat.norm()]), flat[step // 2 :: step][:KEPT]]).cpu().numpy()


# ---- cases of models -------------------------------------------------------------------------------------------------
CLASSIFIER = {"num_classes": 7, "width": 0.1}
U = {"first_channels": 4}
DETECTOR = {"num_classes": 3}
STEREO = {"max_disparity": 48, "first_channels": 8}
SMALL_SAGAN = {"side": 32, "attention_at": 16, "num_classes": 4, "noise_channels": 8}
SMALL_SAGAN |= {"generator_channels": 8, "discriminator_channels": 8}
SMALL_BERT = {"vocabulary": 50, "positions": 16, "channels": 16, "layers": 2}
# Name -> the arguments of its cases.
CASES: dict[str, list[dict[str, Any]]] = {
    "deeplab_v2": [{"backbone": "resnet50", "output": output} for output in ("aspp", "plain", "kronecker_qkv")],
    "deeplab_compact": [
        {"backbone": backbone, "output": output, "width": 0.25}
        for backbone, output in (("mobilenet_v2", "plain"), ("kanet_qkv", "softmax"), ("sanet", "kronecker_qkv"))
    ],
    "unet_care": [
        U | {"operator": operator, "spatial_dims": 2} for operator in (None, "softmax", "kronecker_qkv", "siamese")
    ],
    "unet_residual": [U | {"operator": operator} for operator in (None, "kronecker_qkv", "factorized_gaussian")],
    "unet_projection": [U | {"operator": operator} for operator in (None, "kronecker_kv")],
    "psmnet_stacked": [
        {"max_disparity": 48, "operator": operator, "first_channels": 8} for operator in (None, "siamese")
    ],
    "psmnet_basic": [
        {"max_disparity": 48, "operator": operator, "first_channels": 8} for operator in (None, "softmax")
    ],
    "i3d_resnet50": [{"num_classes": 5, "operator": operator} for operator in ("softmax_pooled", "kronecker_qkv")],
    "video_resnet": [{"num_classes": 5}, {"num_classes": 5, "operator": "softmax"}],
    "sagan": [SMALL_SAGAN | {"operator": operator} for operator in (None, "softmax_pooled", "kronecker_qkv")],
    "bert_base": [{"vocabulary": 50, "positions": 16}],
    "bert_large": [{"vocabulary": 50, "positions": 16}],
    "bert_small": [SMALL_BERT | {"operator": operator} for operator in ("factorized_gaussian", "softmax", "dot")],
    "mask_rcnn": [DETECTOR | {"attention": ["fpn1"]}],
    "faster_rcnn": [DETECTOR, DETECTOR | {"attention": ["res4"], "operator": "softmax"}],
}
RUNS: dict[str, Callable[[Any], Any]] = {
    "deeplab_v2": image(41, 57),
    "deeplab_compact": image(64, 80),
    "unet_care": image(16, 20),
    "unet_residual": image(4, 16, 20),
    "unet_projection": image(9, 16, 32),
    "psmnet_stacked": pair,
    "psmnet_basic": pair,
    "i3d_resnet50": image(8, 48, 64, batch=1),
    "video_resnet": image(8, 48, 64, batch=1),
    "sagan": adversaries,
    **dict.fromkeys(("bert_base", "bert_large", "bert_small"), words),
    **dict.fromkeys(("mask_rcnn", "faster_rcnn"), photograph),
}


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of a file -> a model and its arguments."""
    from farfield import models

    found = {}
    for name in models.MODELS:
        for number, arguments in enumerate(CASES.get(name, [CLASSIFIER])):
            found[f"{name}-{number}"] = (name, arguments)
    return found


def run_model(net: Any) -> list[np.ndarray]:
    """What a network gives for the input of its kind, in eval mode and float64."""
    with torch.no_grad():
        given = RUNS.get(net.config["model"], image(64, 72))(net.double().eval())
    return [shortened(each) for each in outputs(given)]


def write_model(file: Path, name: str, arguments: dict[str, Any]) -> None:
    """Write a case: what `save_pretrained` writes as config.json, and outputs."""
    from farfield import models

    net = models.MODELS[name](**arguments)
    net.load_state_dict(draw_state(net))
    case = {"config": net.config, "outputs": [each.tolist() for each in run_model(net)]}
    file.write_text(json.dumps(case) + "\n", encoding="utf-8")


# ---- cases of modules ------------------------------------------------------------------------------------------------
PLAIN = {"project": "", "heads": 1, "scale": 1.0, "coefficient_norm": False, "residual": False, "bias": True}
OPTIONS = [{}, {"project": "qkvo", "heads": 2, "scale": 0.7, "inner_channels": 4, "value_channels": 6}]
OPTIONS += [
    {"project": "v", "heads": 4, "coefficient_norm": True},
    {"project": "qkvo", "residual": True, "bias": False},
]
# Rows of 0.1 that have a norm in no closed form, or read no keys.
UNNORMED, KEYLESS = ("kronecker_qkv",), ("siamese_local",)
ROWS = ("softmax", "softmax_pooled", "kronecker_kv", "kronecker_qkv", "dot", "factorized", "averaged")
ROWS += ("factorized_gaussian", "siamese", "siamese_local", "siamese_ones")
# Of 0.4.
ROWS += ("flare", "linear_relu", "linear_elu", "hedgehog", "inline", "mala")


def module_cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of a file -> a module of `farfield.nn` and its arguments."""
    from farfield.ops import OPERATORS

    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for row in ROWS:
        for number, options in enumerate(OPTIONS):
            if not (options.get("coefficient_norm") and row in UNNORMED):
                arguments = PLAIN | options
                if not row.startswith(("softmax", "kronecker")):
                    arguments["scale"] = 1.0
                arguments["project"] = OPERATORS[row].projections(arguments["project"])
                found[f"GridAttention-{row}-{number}"] = (
                    "GridAttention",
                    {"channels": 8, "operator": row, **arguments},
                )
    for row in ("softmax", "kronecker_qkv", "kronecker_kv", "siamese"):
        arguments = {"channels": 8, "out_channels": 8, "operator": row, "expansion": 2, "heads": 2}
        found[f"AttentionBlock-{row}"] = ("AttentionBlock", arguments)
    for row in ("softmax", "dot", "factorized_gaussian"):
        found[f"TransformerLayer-{row}"] = ("TransformerLayer", {"channels": 8, "operator": row, "heads": 2})
    found["BaseBlock"] = ("BaseBlock", {"channels": 8, "out_channels": 8, "expansion": 2, "skip": True})
    found["SqueezeExcite"] = ("SqueezeExcite", {"channels": 8})
    return found


def run_module(module: nn.Module) -> list[np.ndarray]:
    """What a module gives for an image, with a mask and a context where it takes them, and for a volume."""
    kind, image = type(module).__name__, normal("image", 2, 8, 6, 4)
    valid, volume = uniform("mask", (2, 6, 4)) < 0.7, normal("volume", 1, 8, 2, 4, 6)
    module = module.double().eval()
    with torch.no_grad():
        if kind == "TransformerLayer":
            tokens = image.flatten(2).mT
            given = [module(tokens), module(tokens, mask=valid.flatten(1))]
        else:
            given = [module(image)]
        if kind == "GridAttention":
            given += [module(image, mask=valid), module(volume)]
            if module.operator_name not in KEYLESS:
                given.append(module(image, normal("context", 2, 8, 4, 2)))
    return [shortened(each) for each in given]


def write_module(file: Path, name: str, arguments: dict[str, Any]) -> None:
    """Write a case: a class, its arguments, the names and shapes of its state, and outputs."""
    from farfield import nn as modules

    module = getattr(modules, name)(**arguments)
    module.load_state_dict(draw_state(module))
    state = {key: list(tensor.shape) for key, tensor in module.state_dict().items()}
    outputs_of_it = [each.tolist() for each in run_module(module)]
    case = {"class": name, "arguments": arguments, "state": state, "outputs": outputs_of_it}
    file.write_text(json.dumps(case) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for folder, found, write in ((MODELS, cases(), write_model), (MODULES, module_cases(), write_module)):
        folder.mkdir(exist_ok=True)
        for case, (name, arguments) in found.items():
            file = folder / f"{case}.json"
            if not file.exists():
                write(file, name, arguments)
                print(file.name, file.stat().st_size, flush=True)
