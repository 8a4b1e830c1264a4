"""replace_attention changes all that it was asked for, or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from farfield import replace_attention
from farfield.insertion import linearize
from farfield.insertion._replace import api, hugging_face, learned, saving

TOKENS = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
WORDS = torch.arange(14).reshape(2, 7) % 11 + 20
TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 50}
# Relative error of float32 sums of at most 64 terms, taken twice in each of three layers.
CLOSE = {"rtol": 6 * 64 * torch.finfo(torch.float32).eps, "atol": 6 * 64 * torch.finfo(torch.float32).eps}


class Attend(nn.Module):
    """torch's function in a class of its own, without weights."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(16, 48), Attend()

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.attend(query, key, value).transpose(1, 2).flatten(2)


class Guarded(Block):
    """An attention that does not let anybody set its operator."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attend = 2, 8, None

    def __setattr__(self, name: str, value: object) -> None:
        if name == "operator":
            raise RuntimeError("guarded")
        super().__setattr__(name, value)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.qkv(tokens).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def torchs() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True), 3).eval()


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**TEXT)).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, str, str | list[str] | None]] = {
    "torch": (torchs, TOKENS, "flare", None),
    "transformers": (bert, WORDS, "hedgehog", None),
    "transformers, a layer": (bert, WORDS, "hedgehog", "encoder.layer.1"),
    "no weights": (lambda: nn.Sequential(Block(), nn.LayerNorm(16), Block()).eval(), TOKENS, "linear_elu", None),
}
# What can fail in the middle, where it is called from.
FAILING = [
    (api, "choose_kind"),
    (api, "check_supported"),
    (api, "draw_parameters"),
    (api, "set_parameters"),
    (api, "register_operator"),
    (api, "find_doubts"),
    (api, "note_operators"),
    (api, "read_widths"),
    (api, "_leave_fast_path"),
    (learned, "draw_learned"),
    (hugging_face.copy, "copy"),
    (hugging_face, "uses_interface"),
    (saving, "_describe_replacements"),
    (saving, "chosen_operator"),
]


def describe(model: nn.Module) -> list[Any]:
    """The classes, the attributes, the parameters and the configurations of a model, by identity."""
    parts = [(type(each), {**vars(each)}, {**each._parameters}) for each in model.modules()]
    return [parts, [vars(each.config).copy() for each in model.modules() if hasattr(each, "config")]]


def run(model: nn.Module, given: Tensor) -> Tensor:
    output = model(given)
    return output if isinstance(output, Tensor) else output.last_hidden_state


def failing_at(number: int, function: Callable[..., Any]) -> tuple[Callable[..., Any], Iterator[int]]:
    """A function whose call of this number fails, and the numbers of its calls."""
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise MemoryError(number)
        return function(*args, **kwargs)

    return call, calls


@pytest.mark.parametrize(("holder", "name"), FAILING, ids=[name for _, name in FAILING])
@pytest.mark.parametrize("model", MODELS)
def test_a_failure_at_any_module_leaves_the_model(
    model: str, holder: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, given, operator, where = MODELS[model]
    network = build()
    before, state = run(network, given), describe(network)
    for number in itertools.count():
        with monkeypatch.context() as patch:
            call, calls = failing_at(number, getattr(holder, name))
            patch.setattr(holder, name, call)
            try:
                replace_attention(network, operator, where)
            except MemoryError:
                assert describe(network) == state
                assert torch.equal(run(network, given), before)
                continue
        break
    # So often it is called, and the call in which it does not fail replaces all.
    assert next(calls) <= number
    assert describe(network) != state
    replace_attention(network, "softmax", where)
    torch.testing.assert_close(run(network, given), before, **CLOSE)


@pytest.mark.parametrize("place", range(3))
def test_a_module_that_refuses_its_operator_leaves_those_before_it(place: int) -> None:
    blocks = [Block(), Block(), Block()]
    blocks[place] = Guarded()
    network = nn.Sequential(*blocks, nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True)).eval()
    before, state = network(TOKENS), describe(network)
    with pytest.raises(RuntimeError, match="guarded"):
        replace_attention(network, "linear_elu")
    assert describe(network) == state
    assert torch.equal(network(TOKENS), before)


# ---- attention without weights ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("operator", ["linear_elu", "factorized", "averaged", "dot", "softmax"])
def test_attention_without_weights(operator: str) -> None:
    network = nn.Sequential(Block(), nn.LayerNorm(16)).eval()
    before = network(TOKENS)
    assert list(replace_attention(network, operator)) == ["0.attend"]
    assert torch.allclose(network(TOKENS), before, **CLOSE) == (operator == "softmax")
    replace_attention(network, "softmax")
    torch.testing.assert_close(network(TOKENS), before, **CLOSE)


def test_what_it_learns_is_like_the_weights_around_it() -> None:
    network = Block().double()
    network.attend.num_heads, network.attend.head_dim = 2, 8
    network.attend.count = nn.Parameter(torch.tensor(3), requires_grad=False)  # no weight, as quantized ones
    replace_attention(network, "hedgehog")
    assert network.attend.query_map.dtype == torch.float64
    tokens = TOKENS.double()
    network(tokens).sum().backward()
    assert network.attend.query_map.grad.abs().sum() > 0


@pytest.mark.long
def test_attention_without_weights_is_linearized_by_the_weights_around_it() -> None:
    network = nn.Sequential(Block(), nn.LayerNorm(16)).eval()
    inputs = [TOKENS, TOKENS.flip(0), TOKENS.flip(1)]
    report = linearize(network, "linear_elu", inputs, steps=(0, 2), tune="all", quiet=True)
    assert len(report.losses) == 2
    assert network(TOKENS).isfinite().all()


# ---- parameters of the host's own ------------------------------------------------------------------------------------
class Pooling(nn.Module):
    """Attention of learned queries, which have the name of what `flare` learns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 8
        self.latents, self.key_value = nn.Parameter(torch.randn(5, 16)), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.latents.unflatten(1, (2, 8)).transpose(0, 1).expand(len(tokens), 2, 5, 8)
        key, value = self.key_value(tokens).unflatten(2, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)


def test_a_parameter_of_the_hosts_own_stays() -> None:
    network = Pooling()
    before, state = network(TOKENS), network.state_dict()
    with pytest.raises(ValueError, match=r"has latents of its own.*; fix: "):
        replace_attention(network, "flare")
    assert type(network) is Pooling
    for operator in ("linear_elu", "hedgehog", "softmax"):
        replace_attention(network, operator)
        assert network(TOKENS).shape == before.shape
    assert network.state_dict().keys() == state.keys()
    torch.testing.assert_close(network(TOKENS), before, **CLOSE)
