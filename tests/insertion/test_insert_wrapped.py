"""Models that peft or `nn.DataParallel` has wrapped, on the meta device, scripted, or whose features are taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchvision.models.feature_extraction import create_feature_extractor

from farfield import insert, remove, replace_attention
from farfield.insertion import apply_recipe, places, save_recipe
from farfield.nn import GridAttention
from helpers.small_hosts import Net, felt, identity, image

# One that a sequence runs, one that a hook calls.
PLACES = ["stage", "stage.1"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def with_additions() -> nn.Module:
    model = net()
    insert(model, PLACES, felt, example=image)
    return model


# ---- peft ------------------------------------------------------------------------------------------------------------
def config(**options: object) -> LoraConfig:
    return LoraConfig(r=2, target_modules=["head"], **options)


def draw(model: nn.Module) -> None:
    for each in model.parameters():
        if each.requires_grad:
            nn.init.normal_(each, std=0.3)


def test_peft_trains_and_saves_additions_and_they_are_removed(tmp_path: Path) -> None:
    adapted = get_peft_model(with_additions(), config(modules_to_save=["farfield"]))
    draw(adapted)
    adapted.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(with_additions(), tmp_path)
    assert torch.equal(loaded.eval()(image), adapted.eval()(image))
    before = [name for name in adapted.state_dict() if "farfield" not in name]
    remove(adapted)
    assert list(adapted.state_dict()) == before
    assert adapted(image).isfinite().all()
    remove(loaded, "base_model.model.stage")
    assert {name.split(".farfield")[0] for name in loaded.state_dict() if "farfield" in name} == {
        "base_model.model.stage.1"
    }


def test_hosts_that_peft_saves_lose_their_additions_in_both_copies() -> None:
    adapted = get_peft_model(with_additions(), config(modules_to_save=["stage"]))
    remove(adapted)
    assert not [name for name in adapted.state_dict() if "farfield" in name]
    assert adapted(image).isfinite().all()


@pytest.mark.parametrize("where", [["base_model.model.stage"], "base_model.model.stage.1"])
def test_peft_would_not_save_what_is_inserted_later(where: str | list[str], tmp_path: Path) -> None:
    adapted = get_peft_model(net(), config())
    with pytest.raises(ValueError, match=r'insert: .*peft.*; fix: .* before get_peft_model.*\["farfield"\]'):
        insert(adapted, where, felt, example=image)
    with pytest.raises(ValueError, match=r"places: .*peft.*; fix: places\(model, example\) before get_peft_model"):
        places(adapted, image)
    around = get_peft_model(net(), config(modules_to_save=["stage"])).get_base_model()
    with pytest.raises(ValueError, match=r"insert: stage is wrapped by peft"):
        insert(around, "stage", felt, example=image)
    # Into the model in it, with a recipe beside peft's file.
    insert(adapted.get_base_model(), PLACES, felt, example=image)
    draw(adapted)
    adapted.save_pretrained(tmp_path)
    save_recipe(adapted, tmp_path)
    loaded = PeftModel.from_pretrained(net(), tmp_path)
    apply_recipe(loaded, tmp_path)
    assert torch.equal(loaded.eval()(image), adapted.eval()(image))


@pytest.mark.parametrize(
    "options", [{"modules_to_save": ["farfield"]}, {"target_modules": r".*farfield\.(query|value)"}]
)
def test_a_recipe_of_what_peft_trains_is_saved_before(options: dict[str, object], tmp_path: Path) -> None:
    base = with_additions()
    state = copy.deepcopy(base.state_dict())
    save_recipe(base, tmp_path / "before")
    adapted = get_peft_model(base, LoraConfig(**({"r": 2, "target_modules": ["head"]} | options)))
    draw(adapted)
    with pytest.raises(ValueError, match=r"save_recipe: .* peft .*; fix: save_recipe\(.*\) before get_peft_model"):
        save_recipe(adapted, tmp_path)
    adapted.save_pretrained(tmp_path)
    again = net()
    again.load_state_dict(state, strict=False)
    apply_recipe(again, tmp_path / "before")
    loaded = PeftModel.from_pretrained(again, tmp_path)
    assert torch.equal(loaded.eval()(image), adapted.eval()(image))


# ---- torch -----------------------------------------------------------------------------------------------------------
def test_data_parallel_runs_what_is_inserted_into_its_module() -> None:
    parallel = nn.DataParallel(net())
    with pytest.raises(ValueError, match=r"insert: .* DataParallel.*; fix: insert\(model\.module, where, make"):
        insert(parallel, "module.stage", felt, example=image)
    with pytest.raises(ValueError, match=r"places: .* DataParallel.*; fix: places\(model\.module, example\)"):
        places(parallel, image)
    before = parallel(image)
    insert(parallel.module, PLACES, felt, example=image)
    assert not torch.allclose(parallel(image), before)
    remove(parallel)
    assert torch.equal(parallel(image), before)


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.DataParallel,
        AveragedModel,
        ModelEmaV2,
        ModelEmaV3,
        lambda model: torch.compile(nn.DataParallel(model)),
    ],
)
def test_the_recipe_of_a_wrapped_model_is_that_of_the_model(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    model, loaded = with_additions(), net()
    save_recipe(wrap(model), tmp_path)
    apply_recipe(loaded, tmp_path)
    assert torch.equal(loaded(image), model(image))


def test_the_example_for_a_model_on_another_device() -> None:
    model = net().to("meta")
    with pytest.raises(ValueError, match=r'insert: [\s\S]*\n  fix: .*, example\.to\("meta"\)\.$'):
        insert(model, "stage", identity, example=image)
    with pytest.raises(ValueError, match=r'insert: [\s\S]*\n  fix: .*, its tensors by \.to\("meta"\)\.$'):
        insert(model, "stage", identity, example={"image": image})
    insert(model, "stage", identity, example=image.to("meta"))
    model.to_empty(device=image.device)
    expected = net()
    insert(expected, "stage", felt, example=image)
    model.load_state_dict(expected.state_dict())
    assert torch.equal(model(image), expected(image))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 1).eval()


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24, num_heads=2).eval()


def replaced(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    replace_attention(model, "linear_elu")
    return model


def inserted(where: str, make: Callable[[int], nn.Module]) -> nn.Module:
    model = net()
    insert(model, where, make, example=image)
    return model


def convolve(channels: int) -> nn.Module:
    return nn.Conv2d(channels, channels, 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "build",
    [
        partial(GridAttention, 8, "siamese"),
        partial(inserted, "stem", felt),
        partial(inserted, "stage", felt),
        partial(inserted, "stem", convolve),
        partial(replaced, encoder),
        partial(replaced, vit),
    ],
)
def test_a_scripted_model_is_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"torch\.jit\.script: .*; fix: torch\.jit\.trace\(model, example\) or"):
        torch.jit.script(build())


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_scripted_again_once_its_additions_are_removed() -> None:
    model = inserted("stem", felt)
    torch.testing.assert_close(torch.jit.trace(model, image, check_trace=False)(image), model(image))
    remove(model)
    assert torch.equal(torch.jit.script(model)(image), model(image))


def test_fx_features_of_a_module_have_its_addition() -> None:
    model, seen = with_additions(), {}
    hook = model.stage[1].register_forward_hook(lambda module, inputs, output: seen.update(block=output))
    model(image)
    hook.remove()
    features = create_feature_extractor(model, {"stage.1": "block", "stage.1.relu_1": "activation"})(image)
    assert torch.equal(features["block"], seen["block"])
    # An operation in the module is what it was: before the addition.
    assert not torch.allclose(features["activation"], seen["block"])
