"""`farfield linearize`: from a trained softmax transformer to a linear one, on texts or images without labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from farfield._files import open_replacement
from farfield._outputs import check_not_input
from farfield.cli.values import CommandLineError, Device
from farfield.insertion import linearize, save_recipe

# Passages or images of a step.
_BATCH = 16
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_WEIGHTS, _REPORT, _PICTURE = "model.safetensors", "report.json", "report.png"


def linearize_network(
    model: str | None = None,
    *,
    out: Path,
    texts: list[Path] | None = None,
    images: Path | None = None,
    operator: str = "hedgehog",
    keep: int = 0,
    steps: int = 120,
    local: int | None = None,
    tune: str = "attention",
    tokens: int = 128,
    device: Device = "cpu",
) -> None:
    """Replace the softmax attention of a trained transformer by a linear operator, and train it to the same features.

        farfield linearize sentence-transformers/all-MiniLM-L6-v2 --texts corpus.txt --out linear
        farfield linearize timm:vit_small_patch16_224 --images photographs --operator flare --keep 2 --out linear

    No labels are needed. A command that was interrupted goes on if it is repeated. The folder then has the weights, the
    recipe with which farfield.insertion.apply_recipe restores the network, and a report as JSON and as a picture.

    Args:
        model: A folder or a name of the Hub with an encoder of transformers, or timm: and a name of timm.
        out: The folder that is written.
        texts: A file of text; may be given several times. They are cut into passages.
        images: A folder of images, for a network of timm.
        operator: An operator that farfield operators lists.
        keep: How many attentions stay softmax, those that matter most.
        steps: Training steps, half of each attention alone and half of the whole network.
        local: Length of a local branch, a convolution along the tokens; odd.
        tune: What is trained: attention, lora or all.
        tokens: Tokens of a passage.
        device: Device on which the network runs.
    """
    if model is None:
        raise CommandLineError("give a model, farfield linearize FOLDER --texts corpus.txt --out linear")
    check_not_input(out, [Path(model), *(texts or []), *([] if images is None else [images])])
    if out.is_file():
        raise CommandLineError(f"--out {out} is a file; fix: a folder")
    torch.manual_seed(0)
    if images is not None and not model.startswith("timm:"):
        raise CommandLineError(f"--images are for a network of timm; fix: timm:{model}, or --texts in their place")
    if model.startswith("timm:"):
        network, inputs = _load_images(model.removeprefix("timm:"), images)
    else:
        network, inputs = _load_texts(model, texts, tokens)
    network.to(device)
    kind = cast(Literal["attention", "lora", "all"], tune)
    report = linearize(network, operator, inputs, keep=keep, steps=steps, local=local, tune=kind, folder=out)
    print(report)
    if hasattr(network, "save_pretrained"):
        cast(Any, network).save_pretrained(out)
    else:
        from safetensors.torch import save_file

        save_file({name: each.contiguous() for name, each in network.state_dict().items()}, out / _WEIGHTS)
    save_recipe(network, out)
    with open_replacement(out / _REPORT) as file:
        file.write(json.dumps(asdict(report), indent=1).encode())
    report.plot(out / _PICTURE)
    print(f"written to {out}; farfield.insertion.apply_recipe(model, {str(out)!r}) restores it in a new process")


def _load_texts(model: str, texts: list[Path] | None, tokens: int) -> tuple[nn.Module, list[Any]]:
    """Return an encoder of transformers, and batches of passages of texts in a drawn order."""
    if not texts:
        raise CommandLineError("give texts to train on, --texts corpus.txt")
    if missing := next((path for path in texts if not path.is_file()), None):
        raise CommandLineError(f"there is no file {missing}; fix: --texts FILE")
    from transformers import AutoModel, AutoTokenizer

    try:
        network = AutoModel.from_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
    except OSError as error:
        raise CommandLineError(f"{model} is no encoder of transformers: {str(error).splitlines()[0]}") from error
    longest = getattr(network.config, "max_position_embeddings", tokens)
    if tokens > longest:
        raise CommandLineError(f"--tokens {tokens}: {model} has {longest} positions; fix: --tokens {longest}")
    ids = [each for path in texts for each in _encode(tokenizer, path)]
    # The special tokens before and after a text.
    word, whole = (tokenizer("a", add_special_tokens=each)["input_ids"] for each in (False, True))
    before = whole[: whole.index(word[0])]
    after = whole[len(before) + len(word) :]
    inner = tokens - len(before) - len(after)
    rows = torch.tensor([before + ids[at : at + inner] + after for at in range(0, len(ids) - inner, max(1, inner))])
    if inner < 1 or len(rows) < 2 * _BATCH:
        fix = "more text, or fewer --tokens" if inner > 0 else "more --tokens"
        raise CommandLineError(
            f"the texts have {len(rows)} passages of {tokens} tokens, and two steps take {2 * _BATCH}; fix: {fix}"
        )
    rows = rows[torch.randperm(len(rows))]
    return network.eval(), [{"input_ids": each} for each in rows[: len(rows) // _BATCH * _BATCH].split(_BATCH)]


def _encode(tokenizer: Any, path: Path, at_once: int = 20_000) -> Iterator[int]:
    """Yield the tokens of a file, so many characters at a time."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandLineError(f"{path} is no text in UTF-8: {error}; fix: --texts FILE") from error
    for start in range(0, len(text), at_once):
        yield from tokenizer(text[start : start + at_once], add_special_tokens=False, verbose=False)["input_ids"]


def _load_images(name: str, folder: Path | None) -> tuple[nn.Module, Any]:
    """Return a network of timm, and batches of the images of a folder, which are read as they are needed."""
    if folder is None:
        raise CommandLineError("give images to train on, --images FOLDER")
    if not folder.is_dir():
        raise CommandLineError(f"there is no folder {folder}; fix: --images FOLDER")
    import timm

    try:
        network = timm.create_model(name, pretrained=True)
    except RuntimeError as error:
        raise CommandLineError(f"timm has no {name}: {error}; fix: a name of timm.list_models()") from error
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    paths = sorted(each for each in folder.rglob("*") if each.suffix.lower() in _SUFFIXES)
    if len(paths) < 2 * _BATCH:
        raise CommandLineError(f"{folder} has {len(paths)} images, and two steps take {2 * _BATCH}; fix: more images")
    order = [paths[index] for index in torch.randperm(len(paths)).tolist()]
    return network.eval(), _Images(order, transform)


class _Images:
    """Batches of images, read each time that they are gone through."""

    def __init__(self, paths: list[Path], transform: Any) -> None:
        self.paths, self.transform = paths, transform

    def __iter__(self) -> Iterator[Tensor]:
        from PIL import Image

        for start in range(0, len(self.paths) - _BATCH + 1, _BATCH):
            chosen = self.paths[start : start + _BATCH]
            yield torch.stack([self.transform(Image.open(path).convert("RGB")) for path in chosen])
