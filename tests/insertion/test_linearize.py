"""linearize: a student comes nearer to its teacher, resumes to the bit, and leaves alone what it is not to train."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from farfield import ops, replace_attention
from farfield.insertion import linearize, save_recipe
from farfield.insertion._linearize import api, features, training
from farfield.insertion._linearize.alone import compare_alone, record_attentions

QUIET = {"quiet": True}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_LENGTHS", (16, 32))


def sharpened(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network, the same each time, with weights with which softmax attention is far from a mean."""
    torch.manual_seed(1)
    model = build()
    for name, each in model.named_parameters():
        if each.dim() == 2 and "embed" not in name:
            nn.init.normal_(each, std=1.5 * each.shape[1] ** -0.5)
    return model.eval()


def encoder() -> nn.Module:
    return sharpened(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, 0.1, batch_first=True), 3))


def bert() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return sharpened(lambda: transformers.BertModel(transformers.BertConfig(vocab_size=40, **sizes)))


def vit() -> nn.Module:
    options = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 3}
    return sharpened(lambda: timm.create_model("vit_tiny_patch16_224", **options))


def texts(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    valid = torch.ones(4, 10, dtype=torch.long)
    valid[1:, 6:] = 0
    return [
        {"input_ids": torch.randint(0, 40, (4, 10), generator=generator), "attention_mask": valid} for _ in range(count)
    ]


def grids(count: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, *shape, generator=generator) for _ in range(count)]


def padded(count: int) -> list[dict[str, Tensor]]:
    """Inputs of nn.TransformerEncoder with padding, for which torch leaves tokens out where it can."""
    padding = torch.zeros(4, 12, dtype=torch.bool)
    padding[1:, 7:] = True
    return [{"src": each, "src_key_padding_mask": padding} for each in grids(count, 12, 16)]


@pytest.mark.parametrize("operator", ["linear_elu", "hedgehog", ops.flare(6)])
@pytest.mark.parametrize(
    ("build", "inputs"), [(encoder, grids(41, 12, 16)), (vit, grids(41, 3, 16, 16)), (bert, texts(41))]
)
def test_training_comes_nearer_to_the_teacher(
    build: Callable[[], nn.Module], inputs: list[Any], operator: str | ops.Operator
) -> None:
    model = build()
    teacher = copy.deepcopy(model)
    report = linearize(model, operator, inputs, steps=(0, 80), **QUIET)
    assert len(report.losses) == report.steps == 80
    assert report.steps_alone == 0
    # Each input is gone through twice.
    assert sum(report.losses[40:]) < sum(report.losses[:40])
    # The numbers of the report, computed in another way, on the input that is not trained on.
    with torch.no_grad():
        found, wanted = (features.read_features(each, inputs[0]).double().numpy() for each in (model, teacher))
    valid = np.ones(found.shape[:2]) if torch.is_tensor(inputs[0]) else inputs[0]["attention_mask"].numpy()
    squares, own, cosines = 0.0, 0.0, []
    for place in zip(*valid.nonzero(), strict=True):
        one, two = found[place], wanted[place]
        squares, own = squares + float(((one - two) ** 2).sum()), own + float((two**2).sum())
        cosines.append(float(one @ two) / float(np.linalg.norm(one) * np.linalg.norm(two)))
    assert report.error == pytest.approx((squares / own) ** 0.5, rel=1e-5)
    assert report.agreement == pytest.approx(np.mean(cosines), rel=1e-5)
    assert [cost.tokens for cost in report.costs] == [16, 32]


@pytest.mark.parametrize(("build", "inputs"), [(encoder, padded(41)), (vit, grids(41, 3, 16, 16)), (bert, texts(41))])
def test_by_default_each_alone_comes_first(build: Callable[[], nn.Module], inputs: list[Any]) -> None:
    model = build()
    report = linearize(model, "hedgehog", inputs, steps=80, **QUIET)
    assert report.steps_alone == 40
    assert report.agreement > report.before
    assert ", 40 of each attention alone, " in str(report)


def test_padding_is_not_compared() -> None:
    model, (first, other) = bert(), texts(2)
    changed = other | {"input_ids": torch.where(other["attention_mask"] > 0, other["input_ids"], 7)}
    students = [copy.deepcopy(model), copy.deepcopy(model)]
    for student, given in zip(students, (other, changed), strict=True):
        linearize(student, "linear_elu", [first, given], steps=3, **QUIET)
    for one, two in zip(*(each.state_dict().values() for each in students), strict=True):
        assert torch.equal(one, two)


# ---- each attention alone --------------------------------------------------------------------------------------------
def valid_of(given: Any, response: Tensor) -> Tensor:
    """True where a token is none of padding, as `response` without channels."""
    if not isinstance(given, dict):
        return torch.ones(response.shape[:2], dtype=torch.bool)
    return given["attention_mask"].bool() if "attention_mask" in given else ~given["src_key_padding_mask"]


class AddingInPlace(nn.Module):
    """Two attentions, to whose responses and hidden states the rest adds in place."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(vit().blocks[0].attn for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for attention in self.attentions:
            response = attention(x)
            response += x
            x += response
        return x


def alone(student: nn.Module, teacher: nn.Module, paths: list[str], given: Any) -> dict[str, Tensor]:
    """The squared distance of each attention's response by the squares, each called on what the teacher's gets."""
    hidden: dict[str, Any] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, keywords: Any, output: Any) -> None:
            hidden[path] = (args[0] if args else keywords["hidden_states"]).clone()

        return hook

    handles = [teacher.get_submodule(each).register_forward_hook(keep(each), with_kwargs=True) for each in paths]
    # With gradients torch computes padding too.
    with torch.enable_grad():
        features.read_features(teacher, given)
    for handle in handles:
        handle.remove()
    distances = {}
    for path, x in hidden.items():
        places = valid_of(given, x)
        found, wanted = (respond(each.get_submodule(path), x, places) for each in (student, teacher))
        distances[path] = ((found - wanted)[places] ** 2).sum() / (wanted[places] ** 2).sum()
    return distances


def respond(attention: nn.Module, x: Tensor, valid: Tensor) -> Tensor:
    """Call an attention of torch, timm or transformers, each with a mask of its own form."""
    if isinstance(attention, nn.MultiheadAttention):
        return attention(x, x, x, key_padding_mask=~valid, need_weights=False)[0]
    if hasattr(attention, "qkv"):
        return attention(x)
    return attention(x, attention_mask=valid[:, None, None].expand(-1, -1, x.shape[1], -1))[0]


@pytest.mark.parametrize("operator", ["linear_elu", ops.flare(6)])
@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (encoder, grids(2, 12, 16)),
        (encoder, padded(2)),
        (vit, grids(2, 3, 16, 16)),
        (bert, texts(2)),
        (lambda: sharpened(AddingInPlace), grids(2, 12, 16)),
    ],
)
def test_each_attention_alone_is_called_as_the_teachers_was(
    build: Callable[[], nn.Module], inputs: list[Any], operator: str | ops.Operator
) -> None:
    teacher, student = build(), build()
    chosen = replace_attention(student, operator)
    reference = copy.deepcopy(student)
    teacher.requires_grad_(False)
    if isinstance(teacher, nn.TransformerEncoder):
        teacher.use_nested_tensor = False
    with torch.no_grad(), record_attentions(teacher, list(chosen)) as calls:
        features.read_features(teacher, inputs[1])
    loss = compare_alone(chosen, calls, features.find_mask(teacher, inputs[1]))
    expected = torch.stack(list(alone(reference, teacher, list(chosen), inputs[1]).values()))
    assert len(expected) == len(chosen) >= 2
    torch.testing.assert_close(loss, expected.mean())
    loss.backward()
    expected.mean().backward()
    own = {id(each) for path in chosen for each in student.get_submodule(path).parameters()}
    for (name, one), two in zip(student.named_parameters(), reference.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        assert one.grad is None or id(one) in own
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, msg=name)
    assert not any(each._forward_hooks for each in (*teacher.modules(), *student.modules()))


def test_both_responses_of_joint_attention_are_compared() -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8}
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 12, "caption_projection_dim": 16}
    options = {"pooled_projection_dim": 10, "out_channels": 4, "pos_embed_max_size": 8}
    model = sharpened(lambda: diffusers.SD3Transformer2DModel(**sizes, **options))
    paths = list(replace_attention(copy.deepcopy(model), "linear_elu"))
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 5, 12)}
    given |= {"pooled_projections": torch.randn(2, 10), "timestep": torch.tensor([1, 7])}
    with torch.no_grad(), record_attentions(model, paths) as calls:
        model(**given)
    assert [[len(call.response) for call in calls[path]] for path in paths] == [[2], [2]]
    report = linearize(model, "linear_elu", [given, given], steps=(2, 0), **QUIET)
    assert np.isfinite(report.losses).all()


def last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the state of the last step."""
    monkeypatch.setattr(training.Progress, "copy", lambda self, source, target: None)


@pytest.mark.parametrize("steps", [2, 5])
def test_the_steps_of_the_whole_follow_those_of_each_alone_as_another_call_would(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    last_state(monkeypatch)
    inputs, model, parts = grids(9, 12, 16), encoder(), encoder()
    teacher = copy.deepcopy(model)
    report = linearize(model, "linear_elu", inputs, steps=(3, steps), **QUIET)
    first = linearize(parts, "linear_elu", inputs, steps=(3, 0), **QUIET)
    others = [inputs[0], *inputs[4:], *inputs[1:4]]
    second = linearize(parts, "linear_elu", others, teacher=teacher, steps=(0, steps), **QUIET)
    assert report.losses == (*first.losses, *second.losses)
    assert report.agreement == second.agreement
    for name, each in model.state_dict().items():
        assert torch.equal(parts.state_dict()[name], each), name


@pytest.mark.parametrize("tune", ["attention", "all"])
def test_steps_of_each_alone_bring_each_nearer_and_train_nothing_else(tune: Any) -> None:
    model, inputs = encoder(), grids(41, 12, 16)
    teacher = copy.deepcopy(model)
    before = copy.deepcopy(model)
    paths = list(replace_attention(before, "linear_elu"))
    report = linearize(model, "linear_elu", inputs, steps=(60, 0), tune=tune, **QUIET)
    assert (report.steps, report.steps_alone, len(report.losses)) == (60, 60, 60)
    first, last = (alone(each, teacher, paths, inputs[0]) for each in (before, model))
    assert sum(last.values()) < sum(first.values())
    changed = {name for name, each in teacher.state_dict().items() if not torch.equal(model.state_dict()[name], each)}
    assert changed == {name for name in teacher.state_dict() if ".self_attn." in name}


def test_of_one_number_half_are_of_each_alone() -> None:
    report = linearize(encoder(), "linear_elu", grids(3, 12, 16), steps=7, **QUIET)
    assert (report.steps, report.steps_alone) == (7, 3)


class Renamed(nn.Module):
    """A network of the same features at other paths."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_teacher_with_other_paths_has_no_steps_of_each_alone() -> None:
    inputs = grids(3, 12, 16)
    report = linearize(encoder(), "linear_elu", inputs, teacher=Renamed(encoder()), steps=4, **QUIET)
    assert report.steps_alone == 0
    model = encoder()
    with pytest.raises(
        ValueError, match=r"linearize: .*self_attn is not called in the teacher, .*; fix: steps=\(0, 4\)"
    ):
        linearize(model, "linear_elu", inputs, teacher=Renamed(encoder()), steps=(2, 2), **QUIET)
    linearize(model, "linear_elu", inputs, teacher=Renamed(encoder()), steps=(0, 4), **QUIET)


def test_attentions_that_respond_with_zero_have_no_distance() -> None:
    silent = encoder()
    for each in list(silent.layers)[:-1]:
        nn.init.zeros_(each.self_attn.out_proj.weight)
        nn.init.zeros_(each.self_attn.out_proj.bias)
    inputs = grids(3, 12, 16)
    assert np.isfinite(linearize(copy.deepcopy(silent), "linear_elu", inputs, steps=4, **QUIET).losses).all()
    nn.init.zeros_(silent.layers[-1].self_attn.out_proj.weight)
    nn.init.zeros_(silent.layers[-1].self_attn.out_proj.bias)
    with pytest.raises(ValueError, match=r"linearize: .*.*attentions .* 0 .*; fix: steps=\(0, 4"):
        linearize(silent, "linear_elu", inputs, steps=(2, 2), **QUIET)
    assert linearize(silent, "linear_elu", inputs, steps=4, **QUIET).steps_alone == 0


@pytest.mark.parametrize("form", ["by name", "in order", "added", "sequence first"])
def test_the_padding_of_torchs_encoder_is_not_compared(form: str) -> None:
    model, (first, other) = encoder(), padded(2)
    if form == "sequence first":
        layer = nn.TransformerEncoderLayer(16, 2, 24, 0.1)
        model = sharpened(lambda: nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    changed = other | {"src": torch.where(other["src_key_padding_mask"][..., None], 9.0, other["src"])}

    def formed(given: dict[str, Tensor]) -> Any:
        src, padding = given["src"], given["src_key_padding_mask"]
        if form == "added":
            padding = torch.zeros(padding.shape).masked_fill(padding, -torch.inf)
        if form == "sequence first":
            src = src.transpose(0, 1)
        return (src, None, padding) if form == "in order" else {"src": src, "src_key_padding_mask": padding}

    students = [copy.deepcopy(model), copy.deepcopy(model)]
    reports = [
        linearize(student, "linear_elu", [formed(first), formed(given)], steps=4, **QUIET)
        for student, given in zip(students, (other, changed), strict=True)
    ]
    assert reports[0].losses == pytest.approx(reports[1].losses, rel=1e-5)
    for one, two in zip(*(each.state_dict().values() for each in students), strict=True):
        torch.testing.assert_close(one, two)


def test_a_sample_of_padding_alone_changes_nothing() -> None:
    inputs = padded(3)
    for each in inputs:
        each["src_key_padding_mask"] = each["src_key_padding_mask"].clone()
        each["src_key_padding_mask"][0] = True
    without = [{name: value[1:] for name, value in each.items()} for each in inputs]
    reports = [linearize(encoder(), "linear_elu", each, steps=4, **QUIET) for each in (inputs, without)]
    assert reports[0].losses == pytest.approx(reports[1].losses, rel=1e-5)
    assert reports[0].agreement == pytest.approx(reports[1].agreement, rel=1e-5)


class Block(nn.Module):
    """A network of one attention, which may be called with a dictionary."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        attention = bert().encoder.layer[0].attention.self
        self.attn, self.by_name = ByName(attention) if by_name else attention, by_name

    def forward(self, x: Tensor) -> Tensor:
        return self.attn({"x": x})["x"] if self.by_name else self.attn(x)[0]


class ByName(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.inner(given["x"])[0]}


def test_a_teacher_that_calls_its_attention_otherwise() -> None:
    inputs, teacher = grids(3, 12, 16), Block(by_name=True)
    assert linearize(Block(by_name=False), "linear_elu", inputs, teacher=teacher, steps=4, **QUIET).steps_alone == 0
    model = Block(by_name=False)
    with pytest.raises(ValueError, match=r"linearize: .*attention .*; fix: steps=\(0, 4\)"):
        linearize(model, "linear_elu", inputs, teacher=teacher, steps=(2, 2), **QUIET)
    linearize(model, "linear_elu", inputs, teacher=teacher, steps=(0, 4), **QUIET)


class Weighing(nn.Module):
    """Returns its input, and weights of its first tokens for each token."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys = keys

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x @ x[:, : self.keys].mT


# As many tokens as channels or not; fewer keys than tokens, as cross-attention has.
@pytest.mark.parametrize(("length", "keys"), [(12, 12), (16, 16), (12, 7)])
def test_weights_are_no_response(length: int, keys: int) -> None:
    network = nn.Sequential(Weighing(keys))
    with record_attentions(network, ["0"]) as calls:
        network(torch.randn(2, length, 16))
    assert [len(call.response) for call in calls["0"]] == [1]


def test_a_hook_of_the_attention_is_applied_once() -> None:
    model = encoder()
    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(lambda module, args: tuple(3 * each for each in args))
    report = linearize(model, "softmax", grids(3, 12, 16), steps=(1, 0), **QUIET)
    assert report.losses[0] < 1e-9


def test_a_student_of_another_dtype() -> None:
    report = linearize(bert().bfloat16(), "linear_elu", texts(3), teacher=bert(), steps=4, **QUIET)
    assert report.steps_alone == 2
    assert np.isfinite(report.losses).all()


def test_with_checkpoints_of_activations() -> None:
    model, inputs = vit(), grids(3, 3, 16, 16)
    model.set_grad_checkpointing()
    reports = [linearize(each, "linear_elu", inputs, steps=4, **QUIET) for each in (vit(), model)]
    assert reports[0].losses == pytest.approx(reports[1].losses, rel=1e-5)


def test_a_teacher_without_features_is_refused() -> None:
    model = encoder()
    nn.init.zeros_(model.layers[-1].norm2.weight)
    nn.init.zeros_(model.layers[-1].norm2.bias)
    with pytest.raises(ValueError, match=r"linearize: .*features .* 0.*fix: .*trained network"):
        linearize(model, "linear_elu", grids(3, 12, 16), **QUIET)


def test_a_transformer_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 8, "norm_num_groups": 4}
    model = sharpened(lambda: diffusers.Transformer2DModel(num_layers=2, cross_attention_dim=12, **sizes))
    inputs = [{"hidden_states": each, "encoder_hidden_states": torch.randn(4, 5, 12)} for each in grids(3, 8, 4, 6)]
    teacher = copy.deepcopy(model)
    report = linearize(model, "linear_elu", inputs, steps=(2, 2), **QUIET)
    with torch.no_grad():
        found, wanted = (each(**inputs[0]).sample for each in (model, teacher))
    assert report.agreement == pytest.approx(float(torch.cosine_similarity(found, wanted, 1).mean()), rel=1e-5)


def test_what_is_not_tuned_stays_and_flags_and_mode_are_kept() -> None:
    model = encoder().train()
    model.layers[0].linear1.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    flags = {name: each.requires_grad for name, each in model.named_parameters()}
    linearize(model, "hedgehog", grids(3, 12, 16), steps=4, **QUIET)
    changed = {name for name, each in before.items() if not torch.equal(model.state_dict()[name], each)}
    assert changed == {name for name in before if ".self_attn." in name}
    assert {name: each.requires_grad for name, each in model.named_parameters() if name in flags} == flags
    assert model.layers[1].self_attn.query_map.requires_grad
    assert all(module.training for module in model.modules())


def test_all_weights_are_tuned() -> None:
    model = encoder()
    before = copy.deepcopy(model.state_dict())
    linearize(model, "linear_elu", grids(3, 12, 16), steps=2, tune="all", **QUIET)
    assert not [name for name, each in before.items() if torch.equal(model.state_dict()[name], each)]


def test_lora_is_merged() -> None:
    model, inputs = bert(), texts(41)
    before = copy.deepcopy(model.state_dict())
    report = linearize(model, "hedgehog", inputs, steps=(0, 80), tune="lora", **QUIET)
    assert sum(report.losses[40:]) < sum(report.losses[:40])
    added = {f"encoder.layer.{layer}.attention.self.{side}_map" for layer in (0, 1) for side in ("query", "key")}
    assert model.state_dict().keys() == before.keys() | added
    for name, each in before.items():
        difference = model.state_dict()[name] - each
        trained = name.endswith((".query.weight", ".key.weight", ".value.weight"))
        assert bool(difference.any()) == trained, name
        assert not trained or torch.linalg.matrix_rank(difference, rtol=1e-4) <= 8


def test_lora_is_added_to_the_chosen_layers_alone() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = bert().encoder.layer[0].attention.self

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x)[0]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.inner = Block().attn, Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.attn(x)[0])

    model = Two().eval()
    before = copy.deepcopy(model.state_dict())
    linearize(model, "linear_elu", grids(3, 6, 16), where="attn", steps=3, tune="lora", **QUIET)
    changed = {name for name, each in before.items() if not torch.equal(model.state_dict()[name], each)}
    assert changed == {f"attn.{part}.weight" for part in ("query", "key", "value")}


def test_the_layers_that_matter_most_stay_softmax() -> None:
    model, inputs = encoder(), grids(3, 12, 16)
    teacher = copy.deepcopy(model)
    report = linearize(model, "averaged", inputs, keep=1, steps=1, **QUIET)
    # Replaced one by one, in another way.
    wanted, errors = teacher(inputs[0]).detach(), {}
    for path in report.layers:
        student = copy.deepcopy(teacher)
        replace_attention(student, "averaged", path)
        errors[path] = float((student(inputs[0]).detach() - wanted).norm() / wanted.norm())
        assert report.layers[path] == pytest.approx(errors[path], rel=1e-4)
    assert report.kept == (max(errors, key=errors.__getitem__),)
    assert {path for path in errors if type(model.get_submodule(path)) is nn.MultiheadAttention} == set(report.kept)


def test_a_local_branch_is_a_convolution_of_the_values() -> None:
    model, x = encoder(), torch.randn(2, 9, 16)
    report = linearize(model, "linear_elu", grids(3, 9, 16), local=3, steps=6, **QUIET)
    assert report.parts.keys() == {"summary only", "local only"}
    attention = model.layers[0].self_attn
    kernel = attention.local_kernel
    assert bool(kernel.any())
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    with torch.no_grad():
        query, key, value = (x @ attention.in_proj_weight.mT + attention.in_proj_bias).chunk(3, -1)
        value = value.masked_fill(padding[..., None], 0)
        response = ops.linear_elu_attention(query.mT, key.mT, value.mT, heads=2, mask=~padding).mT
        for sample in range(2):
            for token in range(9):
                for offset in (-1, 0, 1):
                    if 0 <= token + offset < 9:
                        response[sample, token] += kernel[:, 0, 1 + offset] * value[sample, token + offset]
        found = attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        torch.testing.assert_close(found, attention.out_proj(response))


# ---- a part of a larger model ----------------------------------------------------------------------------------------
class Towers(nn.Module):
    """Two encoders, of images and of texts, that return a number; images alone do not reach the second."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.runs = encoder(), encoder(), 0

    def forward(self, image: Tensor, text: Tensor | None = None) -> dict[str, Tensor]:
        images = self.image(image)
        self.runs += 1
        return {"score": images.mean() + (0 if text is None else self.text(text).mean())}


def pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(grids(count, 9, 16), grids(count, 5, 16), strict=True))


@pytest.mark.parametrize("tune", ["attention", "all"])
@pytest.mark.parametrize("steps", [12, (0, 12)])
def test_a_tower_of_a_larger_model(tune: Any, steps: Any) -> None:
    model = Towers()
    before = copy.deepcopy(model)
    report = linearize(model, "linear_elu", pairs(3), where="image", steps=steps, tune=tune, **QUIET)
    alone = copy.deepcopy(before.image)
    expected = linearize(alone, "linear_elu", [image for image, _ in pairs(3)], steps=steps, tune=tune, **QUIET)
    assert report.agreement == pytest.approx(expected.agreement)
    assert report.before == pytest.approx(expected.before)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.image.state_dict()[name], value)
    assert all(map(torch.equal, model.text.state_dict().values(), before.text.state_dict().values()))
    assert model.runs == before.runs  # copies run


def test_what_lies_behind_a_tower_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: nn.Module, *_: object) -> None:
        raise AssertionError

    model = Towers()
    monkeypatch.setattr(type(model), "forward", lambda self, image, text: fail(self.image(image)))
    assert features.read_features(model, pairs(1)[0], "image").shape == (4, 9, 16)


def test_a_tower_that_an_input_does_not_reach() -> None:
    inputs = grids(3, 9, 16)
    with pytest.raises(ValueError, match="text is not called"):
        linearize(Towers(), "linear_elu", inputs, where="text", steps=4, **QUIET)
    with pytest.raises(TypeError, match=r"must return a tensor of features.*; fix: .*where="):
        linearize(Towers(), "linear_elu", inputs, where="text.**", steps=4, **QUIET)


# ---- what is not finite, half precision, the best state --------------------------------------------------------------
def with_number(inputs: list[Tensor], place: int, number: float) -> list[Tensor]:
    """The inputs, with one number of one of them changed."""
    changed = [each.clone() for each in inputs]
    changed[place].view(-1)[5] = number
    return changed


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf, 1e30])
@pytest.mark.parametrize("steps", [(4, 0), (0, 4)])
@pytest.mark.parametrize(("build", "shape"), [(encoder, (12, 16)), (vit, (3, 16, 16))])
def test_no_step_is_taken_from_what_is_not_finite(
    build: Callable[[], nn.Module], shape: tuple[int, ...], steps: tuple[int, int], number: float, tmp_path: Path
) -> None:
    model, inputs = build(), with_number(grids(4, *shape), 2, number)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"linearize: input 2, .* in step 1 .*fix: leave the input out"):
        linearize(model, "linear_elu", inputs, steps=steps, **QUIET)
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())
    report = linearize(model, "linear_elu", inputs[:2] + inputs[3:], steps=steps, **QUIET)
    assert np.isfinite(report.losses).all()
    assert all(bool(each.isfinite().all()) for each in model.state_dict().values())


def test_no_step_is_taken_from_a_gradient_that_is_not_finite() -> None:
    class Rooted(nn.Module):
        """Adds 0 to the features of some inputs, as a root, whose derivative at 0 is infinite."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder()

        def forward(self, x: Tensor) -> Tensor:
            found = self.inner(x)
            return found + (0 * found).abs().sqrt() if x.max() == 7 else found

    inputs = with_number(grids(4, 12, 16), 2, 7.0)
    with pytest.raises(ValueError, match=r"linearize: input 2, .*gradient that is not finite.*fix: leave the input"):
        linearize(Rooted(), "linear_elu", inputs, steps=(0, 4), **QUIET)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("build", "inputs"), [(encoder, padded(9)), (vit, grids(9, 3, 16, 16)), (bert, texts(9))])
@pytest.mark.parametrize("tune", ["attention", "all"])
def test_half_precision_is_trained(
    build: Callable[[], nn.Module], inputs: list[Any], dtype: torch.dtype, tune: Any
) -> None:
    model = build().to(dtype)
    inputs = tree_map_only(Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, inputs)
    kinds = {name: each.dtype for name, each in model.state_dict().items()}
    report = linearize(model, "linear_elu", inputs, steps=16, tune=tune, **QUIET)
    assert report.steps_alone == 8
    assert np.isfinite(report.losses).all()
    assert all(bool(each.isfinite().all()) for each in model.state_dict().values())
    assert {name: each.dtype for name, each in model.state_dict().items()} == kinds
    assert report.agreement > report.before


def test_half_precision_is_trained_as_float32_is(monkeypatch: pytest.MonkeyPatch) -> None:
    last_state(monkeypatch)
    half = bert().bfloat16()
    wide, teacher = copy.deepcopy(half).float(), copy.deepcopy(half)
    reports = [linearize(each, "linear_elu", texts(5), teacher=teacher, steps=6, **QUIET) for each in (half, wide)]
    assert reports[0].losses == reports[1].losses
    for name, each in wide.state_dict().items():
        assert torch.equal(half.state_dict()[name], each.bfloat16()), name


def recorded_distances(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """The steps after which the held-out input is compared, and the distances then, as they come."""
    distances = list[tuple[int, float]]()
    keep = training.Progress.keep_best

    def keep_best(progress: training.Progress) -> None:
        distances.append((progress.done, progress.measure()))
        keep(progress)

    monkeypatch.setattr(training.Progress, "keep_best", keep_best)
    return distances


@pytest.mark.parametrize("steps", [7, 60])
@pytest.mark.parametrize("local", [None, 3])
def test_the_state_that_is_nearest_is_kept(steps: int, local: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    distances = recorded_distances(monkeypatch)
    model, inputs = encoder(), grids(5, 12, 16)
    teacher = copy.deepcopy(model)
    report = linearize(model, "linear_elu", inputs, steps=steps, local=local, **QUIET)
    assert 7 <= len(distances) <= 11
    assert distances[-1][0] == steps
    assert (report.best_step, report.error**2) == pytest.approx(min(distances, key=lambda each: each[1]))
    with torch.no_grad():
        found, wanted = model(inputs[0]), teacher(inputs[0])
    assert float((found - wanted).norm() / wanted.norm()) == pytest.approx(report.error, rel=1e-5)
    assert f"nearest after step {report.best_step})" in str(report)


@pytest.mark.parametrize("tune", ["attention", "lora", "all"])
def test_a_network_that_is_close_already_is_not_made_worse(tune: Any) -> None:
    # At its start, where softmax attention is nearly a mean.
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2}
    model, inputs = timm.create_model("vit_tiny_patch16_224", **options).eval(), grids(9, 3, 16, 16)
    start = copy.deepcopy(model)
    replace_attention(start, "averaged")
    report = linearize(model, "averaged", inputs, steps=30, tune=tune, **QUIET)
    assert 0.999 < report.before <= report.agreement
    if report.best_step == 0:
        for name, each in start.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], each, rtol=0, atol=0, msg=name)


def test_of_softmax_the_start_is_kept() -> None:
    model, inputs = encoder(), grids(5, 12, 16)
    before = copy.deepcopy(model.state_dict())
    report = linearize(model, "softmax", inputs, steps=(0, 20), **QUIET)
    assert report.best_step == 0
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())


def test_a_start_that_is_not_finite_is_refused() -> None:
    def build() -> nn.Module:
        model = vit().half()
        # Products of queries and keys are beyond float16.
        nn.init.constant_(model.blocks[0].attn.qkv.bias, 300.0)
        return model

    model, inputs = build(), [each.half() for each in grids(3, 3, 16, 16)]
    with pytest.raises(ValueError, match=r"linearize: with dot .* not finite; fix: .*float32"):
        linearize(model, "dot", inputs, steps=4, **QUIET)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), build().parameters(), strict=True))
    report = linearize(model.float(), "dot", [each.float() for each in inputs], steps=4, **QUIET)
    assert np.isfinite(report.losses).all()


# ---- what a DataLoader yields, and what is no list of inputs ---------------------------------------------------------
class OneArgument(nn.Module):
    """A network whose forward takes an image alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = vit()

    def forward(self, image: Tensor) -> Tensor:
        return self.inner.forward_features(image)


LABELS = torch.arange(12) % 3


@pytest.mark.parametrize("batch", [4, 12])
@pytest.mark.parametrize(
    ("build", "samples", "labels"),
    [
        (vit, torch.randn(12, 3, 16, 16), [LABELS]),
        (vit, torch.randn(12, 3, 16, 16), [[f"{number}.png" for number in range(12)]]),
        (OneArgument, torch.randn(12, 3, 16, 16), [LABELS, LABELS]),
        (OneArgument, torch.randn(12, 3, 16, 16), [torch.randn(12, 3)]),
        (encoder, torch.randn(12, 12, 16), [LABELS.to(torch.uint8)]),
        (bert, torch.randint(0, 40, (12, 12)), [LABELS]),
    ],
)
def test_labels_of_a_data_loader_are_left_out(
    build: Callable[[], nn.Module], samples: Tensor, labels: list[Any], batch: int
) -> None:
    pairs = list(zip(samples, *labels, strict=True)) * 2
    loader = torch.utils.data.DataLoader(pairs, batch_size=batch)
    models = build(), build()
    plain = list(torch.cat([samples, samples]).split(batch))
    given = zip(models, (loader, plain), strict=True)
    reports = [linearize(model, "linear_elu", inputs, steps=4, **QUIET) for model, inputs in given]
    assert reports[0].losses == reports[1].losses
    for one, two in zip(*(each.state_dict().values() for each in models), strict=True):
        assert torch.equal(one, two)


def test_masks_of_a_data_loader_are_kept() -> None:
    inputs = texts(4)
    pairs = [pair for each in inputs for pair in zip(each["input_ids"], each["attention_mask"], strict=True)]
    loader = torch.utils.data.DataLoader(pairs, batch_size=4)
    named = [dict(zip(("input_ids", "attention_mask"), each, strict=True)) for each in loader]
    with torch.no_grad():
        found, wanted = (features.read_features(bert(), next(iter(each))) for each in (loader, named))
    assert torch.equal(found, wanted)
    padding = padded(1)[0]
    order = (padding["src"], None, padding["src_key_padding_mask"])
    with torch.no_grad():
        assert torch.equal(*(features.read_features(encoder(), each) for each in (order, padding)))


@pytest.mark.parametrize("number", [0, 2])
def test_what_the_network_raises_names_the_input(number: int) -> None:
    inputs: list[Any] = grids(4, 3, 16, 16)
    inputs[number], model = (inputs[number], torch.rand(4, 3)), vit()
    with pytest.raises(RuntimeError) as caught:
        linearize(model, "linear_elu", inputs, steps=4, **QUIET)
    note = "".join(caught.value.__notes__)
    assert f"input {number}, (4, 3, 16, 16)" in note
    assert "(4, 3)" in note
    assert "fix: inputs=[each[0] for each in inputs]" in note
    inputs[number] = inputs[number][0]
    linearize(model, "linear_elu", inputs, steps=4, **QUIET)


@pytest.mark.parametrize(
    ("inputs", "fact"),
    [
        (torch.randn(8, 12, 16), r"\(8, 12, 16\)"),
        (torch.randn(40, 12, 16), r"\(40, 12, 16\)"),
        (torch.randn(2, 12, 16), r"\(2, 12, 16\)"),
        (torch.randn(8, 12, 16).numpy(), r"\(8, 12, 16\)"),
        (torch.randn(1, 12, 16), r"\(1, 12, 16\)"),
        (torch.tensor(3.0), r"\(\)"),
        ("images", "a str"),
        (Path("images"), "Path"),
        ({"src": torch.randn(8, 12, 16)}, "a dict"),
        (3, "a int"),
        (None, "a NoneType"),
    ],
)
def test_one_input_is_not_taken_apart(inputs: Any, fact: str) -> None:
    model = encoder()
    with pytest.raises(TypeError, match=rf"linearize: inputs must be several, got .*{fact}.*; fix: ") as caught:
        linearize(model, "linear_elu", inputs, steps=2, **QUIET)
    fix = str(caught.value).partition("fix: inputs=")[2].rstrip(".")
    assert bool(fix) == (len(getattr(inputs, "shape", ())) == 3 and len(inputs) > 1)
    if fix:
        linearize(model, "linear_elu", eval(fix, {"inputs": inputs, "torch": torch}), steps=2, **QUIET)


# ---- resuming --------------------------------------------------------------------------------------------------------
class Interrupted(Exception):  # noqa: N818
    """Stands for a process that is killed."""


class Interrupting:
    """Inputs that end the process after some."""

    def __init__(self, inputs: list[Any], count: int) -> None:
        self.inputs, self.left = inputs, count

    def __iter__(self) -> Iterator[Any]:
        for each in self.inputs:
            self.left -= 1
            if self.left < 0:
                raise Interrupted
            yield each


# After three steps the first process ends: within those of each alone, and between these and the others.
@pytest.mark.parametrize("options", [{}, {"tune": "all"}, {"local": 3}, {"steps": (3, 6)}])
def test_a_repeated_call_goes_on_to_the_bit(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "_SECONDS", 0.0)
    inputs, whole, parts = grids(4, 12, 16), encoder(), encoder()
    options = {"steps": 9, **QUIET, **options}
    want = linearize(whole, "hedgehog", inputs, **options)
    for count in (5, 9, 4):
        with pytest.raises(Interrupted):
            linearize(copy.deepcopy(parts), "hedgehog", Interrupting(inputs, count), folder=tmp_path, **options)
    report = linearize(parts, "hedgehog", inputs, folder=tmp_path, **options)
    assert report.losses == want.losses
    for name, each in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], each), name
    again = encoder()
    assert linearize(again, "hedgehog", inputs[:2], folder=tmp_path, **options).losses == want.losses


@pytest.mark.long
def test_a_call_in_another_process_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys, torch\nfrom farfield.insertion import linearize\ntorch.manual_seed(0)\n"
        "layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)\n"
        "model = torch.nn.TransformerEncoder(layer, 1).eval()\ninputs = [torch.randn(2, 6, 16) for _ in range(3)]\n"
        "report = linearize(model, 'flare', inputs, steps=4, folder=sys.argv[1], quiet=True)\nprint(report.losses)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == second != ""


def test_another_model_or_input_is_another_call(tmp_path: Path) -> None:
    inputs = grids(2, 12, 16)
    options = {"steps": 2, "folder": tmp_path, **QUIET}
    linearize(encoder(), "linear_elu", inputs, **options)
    other = encoder()
    nn.init.zeros_(other.layers[0].linear1.weight)
    for model, given in ((other, inputs), (encoder(), grids(3, 12, 16)[1:])):
        with pytest.raises(ValueError, match=r"linearize: .*is of another call.*fix: another folder"):
            linearize(model, "linear_elu", given, **options)


def test_a_checkpoint_of_another_call_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    inputs = grids(2, 12, 16)
    linearize(encoder(), "hedgehog", inputs, steps=2, folder=tmp_path, **QUIET)
    with pytest.raises(
        ValueError, match=r"linearize: .*linearize\.safetensors is of another call.*fix: another folder"
    ):
        linearize(encoder(), "hedgehog", inputs, steps=3, folder=tmp_path, **QUIET)
    path = tmp_path / "linearize.safetensors"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"linearize: .*linearize\.safetensors is no checkpoint.*fix: remove it"):
        linearize(encoder(), "hedgehog", inputs, steps=2, folder=tmp_path, **QUIET)


def trained(folder: Path) -> tuple[dict[str, Any], Path, dict[str, Tensor], dict[str, str]]:
    """Return the options of a call that ended, and its checkpoint, with what that has."""
    options, path = {"steps": 2, "folder": folder, **QUIET}, folder / "linearize.safetensors"
    linearize(encoder(), "hedgehog", grids(2, 12, 16), **options)
    with safe_open(path, "pt") as file:
        return options, path, load_file(path), file.metadata()


def one_of(tensors: dict[str, Tensor], start: str) -> str:
    return next(name for name in tensors if name.startswith(start))


@pytest.mark.parametrize("part", ["now.", "best.", "exp_avg.", "exp_avg_sq.", "step.", "losses", "numbers"])
@pytest.mark.parametrize("change", ["left out", "broadcast", "not finite", "another dim"])
def test_a_checkpoint_of_other_tensors_is_refused(part: str, change: str, tmp_path: Path) -> None:
    options, path, tensors, metadata = trained(tmp_path)
    name = one_of(tensors, part)
    value = tensors.pop(name)
    if change != "left out":
        other = {"broadcast": value.flatten()[:1], "not finite": value * torch.nan, "another dim": value[None]}
        tensors[name] = other[change]
    if part == "step." and change == "broadcast":
        tensors[name] = value.expand(1, 1)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata)
    model = encoder()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"linearize: .*linearize\.safetensors is no checkpoint.*fix: remove it"):
        linearize(model, "hedgehog", grids(2, 12, 16), **options)
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())


@pytest.mark.parametrize("done", [-1, 3, 10**9])
def test_a_checkpoint_of_too_many_steps_is_refused(done: int, tmp_path: Path) -> None:
    options, path, tensors, metadata = trained(tmp_path)
    tensors["numbers"][0] = done
    save_file(tensors, path, metadata)
    with pytest.raises(ValueError, match=r"linearize: .*linearize\.safetensors is no checkpoint.*fix: remove it"):
        linearize(encoder(), "hedgehog", grids(2, 12, 16), **options)
    path.unlink()
    linearize(encoder(), "hedgehog", grids(2, 12, 16), **options)


# ---- mistakes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        ([], {}, "there are no inputs"),
        (grids(1, 12, 16), {}, "inputs are at an end"),
        (iter(grids(3, 12, 16)), {"steps": 4}, "inputs are at an end.*fix: a list or a DataLoader"),
        (grids(2, 12, 16), {"tune": "heads"}, "tune='heads' is none of attention, lora, all; fix: "),
        (grids(2, 12, 16), {"tune": "lora"}, "no linear layers as modules.*fix: tune="),
        (grids(2, 12, 16), {"local": 4}, "local=4 has no middle; fix: local=5"),
        (grids(2, 12, 16), {"keep": 3}, "keep=3 keeps all 3; fix: "),
        (grids(2, 12, 16), {"steps": 0}, "steps"),
        (grids(2, 12, 16), {"steps": (0, 0)}, "steps"),
        (grids(2, 12, 16), {"steps": (-1, 3)}, "steps must be a whole number from 0, got -1"),
        (grids(2, 12, 16), {"steps": (1, 2, 3)}, r"steps=\(1, 2, 3\) must be one number.*fix: \(60, 60\)"),
    ],
)
def test_mistakes_name_the_fix(inputs: Any, options: dict[str, Any], text: str) -> None:
    model = encoder().train()
    model.layers[0].eval()
    before = [copy.deepcopy(model.state_dict()), *state_of(model)]
    with pytest.raises(ValueError, match=f"linearize: .*{text}"):
        linearize(model, "hedgehog", inputs, **QUIET, **options)
    assert state_of(model) == before[1:]
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before[0].items())


def state_of(model: nn.Module) -> list[object]:
    """The kinds and modes of all modules, and which parameters are trained."""
    kinds = [(type(module), module.training) for module in model.modules()]
    return [kinds, {name: each.requires_grad for name, each in model.named_parameters()}]


def test_causal_models_are_refused_by_operators_without_a_state() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40)
    model = transformers.GPT2Model(config).eval()
    with pytest.raises(ValueError, match=r"replace_attention: .*is causal"):
        linearize(model, "factorized_gaussian", texts(2), **QUIET)
    assert "farfield" not in model.config._attn_implementation


def test_a_network_that_returns_no_features() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder()

        def forward(self, x: Tensor) -> list[str]:
            self.inner(x)
            return ["word"]

    with pytest.raises(TypeError, match=r"linearize: .*tensor .*got str; fix: "):
        linearize(Words(), "linear_elu", grids(2, 12, 16), **QUIET)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    report = linearize(encoder(), "linear_elu", grids(2, 12, 16), steps=2, **QUIET)
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 10_000
    assert "layers.2.self_attn" in str(report)


def test_costs_are_measured_once_and_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, measure = list[int](), api._measure_cost
    monkeypatch.setattr(api, "_measure_cost", lambda *args: lengths.append(args[2]) or measure(*args))
    report = linearize(encoder(), "linear_elu", grids(2, 12, 16), steps=2, **QUIET)
    assert lengths == []
    state = torch.get_rng_state()
    assert "(attention of one layer)\n    16 " in str(report)
    read = pickle.loads(pickle.dumps(report))
    assert read.costs == dataclasses.asdict(report)["costs"] == tuple(report.costs)
    assert lengths == [16, 32]
    assert torch.equal(torch.get_rng_state(), state)


IN_A_NEW_PROCESS = """
import sys
import onnxruntime, torch, transformers
from farfield.insertion import apply_recipe

class Features(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, valid):
        return self.model(input_ids=ids, attention_mask=valid).last_hidden_state

def draw(batch, length):
    valid = torch.ones(batch, length, dtype=torch.long)
    valid[1:, length * 2 // 3 :] = 0
    return torch.randint(0, 40, (batch, length)), valid

folder = sys.argv[1]
model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
apply_recipe(model, folder)
found = model(**torch.load(f"{folder}/inputs.pt")).last_hidden_state
assert torch.equal(found, torch.load(f"{folder}/features.pt")), "loaded"
both = {0: "batch", 1: "length"}
file, options = f"{folder}/features.onnx", {"dynamo": True, "external_data": False, "verbose": False}
torch.onnx.export(Features(model), draw(2, 12), file, dynamic_shapes={"ids": both, "valid": both}, **options)
session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
for batch, length in [(1, 5), (3, 33), (2, 130)]:
    ids, valid = draw(batch, length)
    with torch.no_grad():
        want, own = Features(model)(ids, valid), valid[-1].bool()
        alone = Features(model)(ids[-1:, own], valid[-1:, own])
    found = torch.from_numpy(session.run(None, {"ids": ids.numpy(), "valid": valid.numpy()})[0])
    assert torch.allclose(found[valid.bool()], want[valid.bool()], atol=1e-5), ("exported", batch, length)
    assert torch.allclose(alone[0], want[-1][own], atol=1e-5), ("without its padding", batch, length)
"""


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["flare", "hedgehog", "linear_elu"])
def test_in_a_new_process_and_exported_at_three_lengths(operator: str, tmp_path: Path) -> None:
    model, inputs = bert(), texts(9)
    linearize(model, operator, inputs, steps=8, local=3, **QUIET)
    model.save_pretrained(tmp_path)
    save_recipe(model, tmp_path)
    with torch.no_grad():
        torch.save(model(**inputs[0]).last_hidden_state, tmp_path / "features.pt")
    torch.save(inputs[0], tmp_path / "inputs.pt")
    subprocess.run([sys.executable, "-W", "ignore", "-c", IN_A_NEW_PROCESS, str(tmp_path)], check=True)
