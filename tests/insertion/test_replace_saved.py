"""A replaced model of transformers that was saved loads as what it was, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn

from farfield import ops, replace_attention
from farfield.insertion import register_transformers
from farfield.ops.slots import keys, queries

NAME = "farfield_factorized_gaussian"
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**SIZES, "image_size": 12, "patch_size": 4}
DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 50}
CONFIGS = {"Bert": TEXT, "DistilBert": DISTIL, "ViT": IMAGE, "SiglipVision": IMAGE}
WORDS = torch.arange(14).reshape(2, 7) % 11 + 20
PICTURES = torch.linspace(-1, 1, 2 * 3 * 12 * 12).sin().reshape(2, 3, 12, 12)
# A pipeline asks its tokenizer for no more before it is called.
TOKENIZER = cast(Any, SimpleNamespace(mask_token_id=3))
# Ways to load that name no attention.
LOADERS: dict[str, Callable[[Path], object]] = {
    "class": transformers.BertModel.from_pretrained,
    "class with a head": transformers.BertForMaskedLM.from_pretrained,
    "auto": transformers.AutoModel.from_pretrained,
    "auto with a head": transformers.AutoModelForMaskedLM.from_pretrained,
    "pipeline": lambda folder: transformers.pipeline("fill-mask", str(folder), tokenizer=TOKENIZER),
    # As sentence-transformers does.
    "config": lambda folder: transformers.AutoModel.from_pretrained(
        folder, config=transformers.AutoConfig.from_pretrained(folder)
    ),
    "config alone": lambda folder: transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder)),
}


def build(host: str, head: str = "Model") -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{host}Config")(**CONFIGS[host])
    model = getattr(transformers, f"{host}{head}")(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(PICTURES if hasattr(model.config, "image_size") else WORDS)[0]


def entry(folder: Path) -> str | None:
    return json.loads((folder / "config.json").read_text()).get("attn_implementation")


def follow(text: str, load: Callable[..., nn.Module], folder: Path, **names: object) -> nn.Module:
    """Do what the entry says, word by word."""
    first, _, calls = text.partition(", then ")
    implementation = first.removeprefix("farfield: attention was replaced; load with attn_implementation=")
    model = load(folder, attn_implementation=eval(implementation)).eval()
    for call in calls.split(" and "):
        eval(call.removeprefix("farfield."), {"replace_attention": replace_attention, "model": model, **names})
    return model


@pytest.mark.parametrize("way", LOADERS)
def test_every_way_of_loading_names_the_call_that_is_missing(way: str, tmp_path: Path) -> None:
    model = build("Bert", "ForMaskedLM")
    replace_attention(model, "factorized_gaussian")
    model.save_pretrained(tmp_path)
    register_transformers()  # which does not make it load: it would be saved without the entry then
    call = r"load with attn_implementation='eager', then farfield\.replace_attention\(model, 'factorized_gaussian'\)"
    with pytest.raises(ValueError, match=call):
        LOADERS[way](tmp_path)


@pytest.mark.parametrize("host", CONFIGS)
def test_what_the_error_names_gives_the_saved_outputs(host: str, tmp_path: Path) -> None:
    model = build(host)
    replace_attention(model, "factorized_gaussian")
    found = run(model)
    model.save_pretrained(tmp_path / "first")
    loaded = follow(entry(tmp_path / "first") or "", type(model).from_pretrained, tmp_path / "first")
    assert torch.equal(run(loaded), found)
    loaded.save_pretrained(tmp_path / "second")
    assert entry(tmp_path / "second") == entry(tmp_path / "first")


def test_a_pipeline_and_a_class_that_name_the_attention_have_the_saved_outputs(tmp_path: Path) -> None:
    model = build("Bert", "ForMaskedLM")
    replace_attention(model, "factorized_gaussian")
    model.save_pretrained(tmp_path)
    register_transformers()
    options = {"attn_implementation": NAME}
    pipe = transformers.pipeline("fill-mask", str(tmp_path), tokenizer=TOKENIZER, model_kwargs=options)
    named = transformers.BertForMaskedLM.from_pretrained(tmp_path, attn_implementation=NAME)
    for loaded in (pipe.model, named):
        assert torch.equal(run(loaded.eval()), run(model))
    # As any name that a call gave, it is not saved, until the same operator is set by its function.
    named.save_pretrained(tmp_path / "by name")
    assert entry(tmp_path / "by name") is None
    replace_attention(named, "factorized_gaussian")
    assert torch.equal(run(named), run(model))
    named.save_pretrained(tmp_path / "by function")
    assert entry(tmp_path / "by function") == entry(tmp_path)


@pytest.mark.parametrize("host", CONFIGS)
def test_softmax_takes_the_entry_away(host: str, tmp_path: Path) -> None:
    model, original = build(host), build(host)
    replace_attention(model, "softmax")
    assert model.config.to_dict() == original.config.to_dict()
    replace_attention(model, "averaged")
    assert "averaged" in model.config.attn_implementation
    replace_attention(model, "softmax")
    model.save_pretrained(tmp_path)
    assert entry(tmp_path) is None
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(run(loaded), run(original))


def test_some_layers_and_several_operators(tmp_path: Path) -> None:
    model = build("Bert")
    replace_attention(model, "factorized_gaussian", "encoder.layer.1")
    replace_attention(model, "averaged", "encoder.layer.0")
    found = run(model)
    model.save_pretrained(tmp_path / "two")
    text = entry(tmp_path / "two") or ""
    assert torch.equal(run(follow(text, transformers.AutoModel.from_pretrained, tmp_path / "two")), found)
    replace_attention(model, "softmax", "encoder.layer.0")
    found = run(model)
    model.save_pretrained(tmp_path / "one")
    text = entry(tmp_path / "one") or ""
    assert text == (
        "farfield: attention was replaced; load with attn_implementation='eager', then "
        "farfield.replace_attention(model, 'factorized_gaussian', where='encoder.layer.1.attention.self')"
    )
    loaded = follow(text, transformers.BertModel.from_pretrained, tmp_path / "one")
    # The layer of softmax is farfield's before, and the host's own after.
    assert torch.allclose(run(loaded), found, rtol=1e-4, atol=1e-5)


def test_a_tower_of_a_model_of_two(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=16)
    model = transformers.CLIPModel(config).eval()
    inputs = {"input_ids": WORDS, "pixel_values": PICTURES}
    replace_attention(model, "factorized_gaussian", where="vision_model")
    with torch.no_grad():
        found = model(**inputs)
    model.save_pretrained(tmp_path / "both")
    with pytest.raises(ValueError, match=r"where='vision_model\.encoder\.layers\.\*\.self_attn'\)"):
        transformers.AutoModel.from_pretrained(tmp_path / "both")
    loaded = follow(entry(tmp_path / "both") or "", transformers.CLIPModel.from_pretrained, tmp_path / "both")
    with torch.no_grad():
        again = loaded(**inputs)
    assert torch.equal(again.image_embeds, found.image_embeds)
    assert torch.equal(again.text_embeds, found.text_embeds)
    model.vision_model.save_pretrained(tmp_path / "vision")
    with pytest.raises(ValueError, match=r"replace_attention\(model, 'factorized_gaussian'\)"):
        transformers.CLIPVisionModel.from_pretrained(tmp_path / "vision")
    model.text_model.save_pretrained(tmp_path / "text")
    assert entry(tmp_path / "text") is None


def test_an_operator_of_ones_own_is_named_as_such(tmp_path: Path) -> None:
    own = ops.Operator(coefficients=queries, basis=keys, per=lambda query, summary: 2)
    model = build("ViT")
    replace_attention(model, own)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"replace_attention\(model, your_operator\)"):
        transformers.ViTModel.from_pretrained(tmp_path)
    loaded = follow(entry(tmp_path) or "", transformers.ViTModel.from_pretrained, tmp_path, your_operator=own)
    assert torch.equal(run(loaded), run(model))


def test_a_part_changes_and_notes_that_part_alone(tmp_path: Path) -> None:
    model, other = build("Bert"), build("Bert")
    replace_attention(model.encoder.layer[0], "averaged")
    replace_attention(other, "averaged", "encoder.layer.0")
    assert torch.equal(run(model), run(other))
    model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"in a part of this model; load with attn_implementation='eager', then call farfield"
    ):
        transformers.BertModel.from_pretrained(tmp_path)
