"""What was inserted and replaced, saved and applied to the model as its library builds it, also in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from farfield import insert, ops, replace_attention
from farfield.insertion import apply_recipe, save_recipe
from farfield.insertion._replace.learned import add_local
from farfield.nn import GridAttention


def encoder() -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True), 2).eval()


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=50
    )
    return transformers.BertModel(config).eval()


def vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=2, num_classes=3
    ).eval()


def resnet() -> nn.Module:
    return torchvision.models.resnet18(num_classes=3).eval()


def draw(model: nn.Module) -> None:
    """Change every number, so that nothing is right because it was built alike."""
    for each in model.parameters():
        nn.init.normal_(each, std=0.3)


IMAGE, TOKENS = torch.randn(2, 3, 32, 32), torch.randn(2, 9, 16)
IDS = torch.randint(0, 50, (2, 9))


@pytest.mark.parametrize("operator", ["linear_elu", "hedgehog", "siamese", ops.flare(5)])
@pytest.mark.parametrize(("build", "given"), [(encoder, TOKENS), (vit, IMAGE), (bert, IDS)])
def test_a_replaced_model_is_restored(
    build: partial[nn.Module], given: Tensor, operator: str | ops.Operator, tmp_path: Path
) -> None:
    model = build()
    chosen = replace_attention(model, operator)
    add_local(next(iter(chosen.values())), 3)
    draw(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_recipe(model, tmp_path)
    loaded = build()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"), strict=False)
    apply_recipe(loaded, tmp_path)
    for one, two in zip(first_tensors(loaded(given)), first_tensors(model(given)), strict=True):
        assert torch.equal(one, two)
    assert loaded.state_dict().keys() == model.state_dict().keys()


def first_tensors(output: object) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else [output.last_hidden_state]


def test_only_some_layers(tmp_path: Path) -> None:
    model, loaded = encoder(), encoder()
    loaded.load_state_dict(model.state_dict())
    replace_attention(model, "factorized_gaussian", "layers.1")
    save_recipe(model, tmp_path)
    apply_recipe(loaded, tmp_path)
    assert type(loaded.layers[0].self_attn) is nn.MultiheadAttention
    assert torch.equal(loaded(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    "options", [{"project": "qkvo", "residual": True}, {"project": "v", "heads": 2, "bias": False}]
)
def test_inserted_attention_is_restored(options: dict[str, object], tmp_path: Path) -> None:
    model = resnet()
    insert(model, ["layer2", "layer3.1"], partial(GridAttention, operator="siamese", **options), example=IMAGE)
    draw(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    save_recipe(model, tmp_path)
    loaded = resnet()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt"), strict=False)
    apply_recipe(loaded, tmp_path)
    assert torch.equal(loaded(IMAGE), model(IMAGE))


def test_a_recipe_of_0_3_loads(tmp_path: Path) -> None:
    model, loaded = resnet(), resnet()
    insert(model, "layer2.0.conv1", partial(GridAttention, operator="siamese"), example=IMAGE)
    save_recipe(model, tmp_path)
    path = tmp_path / "farfield_recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"watched": [["layer2.0", "conv1"]]}))
    apply_recipe(loaded, tmp_path)
    assert list(loaded.state_dict()) == list(model.state_dict())


@pytest.mark.long
def test_in_a_new_process_with_transformers(tmp_path: Path) -> None:
    model = bert()
    replace_attention(model, "hedgehog")
    draw(model)
    model.save_pretrained(tmp_path)
    save_recipe(model, tmp_path)
    torch.save((IDS, model(IDS).last_hidden_state), tmp_path / "want.pt")
    code = (
        "import sys, torch\nfrom transformers import AutoModel\nfrom farfield.insertion import apply_recipe\n"
        "model = AutoModel.from_pretrained(sys.argv[1], attn_implementation='eager').eval()\n"
        "apply_recipe(model, sys.argv[1])\n"
        "ids, want = torch.load(f'{sys.argv[1]}/want.pt')\n"
        "torch.testing.assert_close(model(ids).last_hidden_state, want)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True)


def test_code_of_ones_own_is_not_written(tmp_path: Path) -> None:
    model = resnet()
    insert(model, "layer2", lambda channels: nn.Conv2d(channels, channels, 1), example=IMAGE)
    with pytest.raises(ValueError, match=r"save_recipe: .*layer2.* Conv2d, which is your own code"):
        save_recipe(model, tmp_path)
    with pytest.raises(ValueError, match=r"save_recipe: nothing .*ResNet"):
        save_recipe(resnet(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"replaced": [{"operator": "os.system", "slots": 0, "local": 0, "paths": ["layers.0.self_attn"]}]},
        {"replaced": [{"operator": "flare", "slots": 10**12, "local": 0, "paths": ["layers.0.self_attn"]}]},
        {"replaced": [{"operator": "dot", "slots": 0, "local": 10**12, "paths": ["layers.0.self_attn"]}]},
        {"replaced": [{"operator": "dot", "slots": 0, "local": 0, "paths": ["layers.7.self_attn"]}]},
        {"inserted": [{"path": "layers.0"}]},
        {"replaced": 3},
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    model = encoder()
    replace_attention(model, "linear_elu")
    save_recipe(model, tmp_path)
    path = tmp_path / "farfield_recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((ValueError, LookupError), match=r"apply_recipe: .*fix: "):
        apply_recipe(encoder(), tmp_path)


class Allocated(TorchDispatchMode):
    """Counts the bytes of what operations return on a device that has memory."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.device.type != "meta"]
        self.total += sum(each.nbytes for each in tensors)
        return outputs


class Both(nn.Module):
    """A network that has attention to replace, and a place where one is inserted."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.encoder = nn.Conv2d(3, 16, 8, 8), encoder()

    def forward(self, image: Tensor) -> Tensor:
        return self.encoder(self.stem(image).flatten(2).mT)


LARGE = 2**14


@pytest.mark.parametrize(
    ("part", "entry"),
    [
        ("inserted", {"options": {"channels": LARGE, "inner_channels": LARGE}}),
        (
            "inserted",
            {"options": {"channels": LARGE, "inner_channels": LARGE, "value_channels": LARGE}, "normed": True},
        ),
        ("inserted", {"operator": "flare", "slots": LARGE}),
        ("replaced", {"operator": "flare", "slots": LARGE}),
        ("replaced", {"local": LARGE}),
        ("replaced", {"operator": "hedgehog"}),
    ],
)
def test_a_recipe_of_other_sizes_than_its_weights_is_refused_before_anything_is_built(
    part: str, entry: dict[str, Any], tmp_path: Path
) -> None:
    model = Both()
    replace_attention(model, ops.flare(5))
    insert(model, "stem", partial(GridAttention, operator="siamese", project="qkvo"), example=IMAGE)
    save_recipe(model, tmp_path)
    apply_recipe(Both(), tmp_path)
    path = tmp_path / "farfield_recipe.json"
    recipe = json.loads(path.read_text())
    options = recipe[part][0].get("options", {}) | entry.get("options", {})
    recipe[part][0] |= entry | ({"options": options} if options else {})
    path.write_text(json.dumps(recipe))
    other = Both()
    kinds = [type(module) for module in other.modules()]
    with Allocated() as allocated, pytest.raises(ValueError, match=r"apply_recipe: .*fix: "):
        apply_recipe(other, tmp_path)
    assert allocated.total < 2**20
    assert [type(module) for module in other.modules()] == kinds


def test_an_addition_that_was_changed_is_not_saved(tmp_path: Path) -> None:
    model = resnet()
    insert(model, "layer2", partial(GridAttention, operator="siamese", project="qkvo"), example=IMAGE)
    model.layer2.farfield.value = nn.Linear(128, 7)
    with pytest.raises(ValueError, match=r"save_recipe: .*layer2\.farfield\.value\.weight is \(7, 128.*fix: "):
        save_recipe(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"apply_recipe: there is no .*farfield_recipe.json"):
        apply_recipe(encoder(), tmp_path)
    model = encoder()
    replace_attention(model, "flare")
    save_recipe(model, tmp_path)
    weights = tmp_path / "farfield_recipe.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"apply_recipe: .* is damaged"):
        apply_recipe(encoder(), tmp_path)


def test_replaced_attention_that_peft_has_wrapped(tmp_path: Path) -> None:
    model = vit()
    replace_attention(model, "flare")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["qkv"]))
    with pytest.raises(ValueError, match=r"save_recipe: peft has wrapped .*; fix: save_recipe\(model.get_base_model"):
        save_recipe(adapted, tmp_path)
    save_recipe(adapted.get_base_model(), tmp_path)
    loaded = vit()
    apply_recipe(loaded, tmp_path)
    assert torch.equal(loaded.blocks[0].attn.latents, model.blocks[0].attn.latents)
