"""Modules of farfield inside a model of transformers, which initializes all that was in no file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertPreTrainedModel

from farfield.nn import GridAttention

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
CONFIG = {**SIZES, "vocab_size": 50, "pad_token_id": 0}
WORDS = torch.arange(14).reshape(2, 7) % 11 + 20


class BertAndGrid(BertPreTrainedModel):
    """BERT and attention of two operators after it, which start as the identity."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        options = {"project": "qkvo", "residual": True}
        self.siamese = GridAttention(16, "siamese", heads=2, project="qvo", residual=True, coefficient_norm=True)
        self.kronecker = GridAttention(16, "kronecker_kv", **options, coefficient_norm="columns")
        self.post_init()

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.bert(words).last_hidden_state
        return tokens, self.kronecker(self.siamese(tokens.mT)).mT


def assert_initial(model: BertAndGrid) -> None:
    """The module is the identity; the vector and the projections are Glorot uniform, the norm is 1 and 0."""
    with torch.no_grad():
        tokens, response = model.eval()(WORDS)
    assert torch.equal(response, tokens)
    for attention in (model.siamese, model.kronecker):
        for parameter in attention.parameters():
            assert parameter.isfinite().all()
        assert not attention.output.weight.any()
        bound = (6 / 32) ** 0.5  # 16 to 16 channels
        assert bound / 2 < float(attention.value.weight.abs().max()) <= bound
        for name, tensor in attention.coefficient_norm.state_dict().items():
            assert bool((tensor == (1 if name in ("weight", "running_var") else 0)).all()), name
    bound = (6 / 9) ** 0.5  # 8 channels of a head to 1
    assert float(model.siamese.weight.abs().min()) > 0
    assert bound / 4 < float(model.siamese.weight.abs().max()) <= bound


def fill_memory() -> list[Tensor]:
    """Freed memory that is not zero, so that what is not initialized shows."""
    return [torch.full((size,), torch.nan) for size in (1, 8, 16, 256) for _ in range(50)]


def test_a_model_that_is_built_keeps_the_initial_values() -> None:
    torch.manual_seed(0)
    assert_initial(BertAndGrid(BertConfig(**CONFIG)))


def test_weights_that_are_in_no_file_get_the_initial_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertModel(BertConfig(**CONFIG), add_pooling_layer=False).save_pretrained(tmp_path)
    fill_memory()
    model, report = BertAndGrid.from_pretrained(tmp_path, output_loading_info=True)
    assert any(name.startswith("siamese") for name in report["missing_keys"])
    assert_initial(model)


def test_weights_that_are_in_a_file_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertAndGrid(BertConfig(**CONFIG))
    for tensor in model.state_dict().values():
        nn.init.uniform_(tensor) if tensor.is_floating_point() else tensor.fill_(3)
    model.save_pretrained(tmp_path)
    for name, tensor in BertAndGrid.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    # Some of the tensors of one module.
    state = load_file(tmp_path / "model.safetensors")
    lost = ("siamese.output.weight", "kronecker.coefficient_norm.running_var", "siamese.value.bias")
    save_file(
        {name: state[name] for name in state if name not in lost}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    for name, tensor in BertAndGrid.from_pretrained(tmp_path).state_dict().items():
        expected = (name.endswith("running_var") * torch.ones_like(tensor)) if name in lost else state[name]
        assert torch.equal(tensor, expected), name


def test_trained_weights_are_not_drawn_again() -> None:
    torch.manual_seed(0)
    model = BertAndGrid(BertConfig(**CONFIG))
    nn.init.ones_(model.siamese.output.weight)
    nn.init.ones_(model.kronecker.coefficient_norm.running_mean)
    model.init_weights()
    assert bool((model.siamese.output.weight == 1).all())
    assert bool((model.kronecker.coefficient_norm.running_mean == 1).all())
    # Nor where anything else reads the attribute.
    attention = GridAttention(16, "siamese", project="qvo")
    before = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    assert not attention._is_hf_initialized
    assert not GridAttention._is_hf_initialized
    for module in attention.modules():
        [getattr(module, name, None) for name in dir(module)]
    assert all(torch.equal(before[name], tensor) for name, tensor in attention.state_dict().items())


def test_a_look_at_a_module_outside_transformers_draws_nothing() -> None:
    norm = GridAttention(16, "siamese", project="qvo", coefficient_norm=True).coefficient_norm
    nn.init.constant_(norm.weight, 3)
    assert not norm._is_hf_initialized
    assert not type(norm)._is_hf_initialized
    assert bool((norm.weight == 3).all())
