"""Which attention replace_attention finds: what code names, what `where` names in full, what flags rule out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from farfield import replace_attention
from farfield.insertion import apply_recipe, save_recipe

TOKENS = torch.randn(2, 11, 24)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def scaled_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query * query.shape[-1] ** -0.5) @ key.mT).softmax(-1) @ value


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads, self.head_dim = nn.Linear(24, 72), 3, 8

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(tokens).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind()

    def core(self, tokens: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.heads(tokens))


class ByAlias(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return sdpa(*self.heads(tokens)).transpose(1, 2).flatten(2)


class ByFunction(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return attend(*self.heads(tokens)).transpose(1, 2).flatten(2)


class ByMethod(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.core(tokens).transpose(1, 2).flatten(2)


class ByAttribute(Base):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = partial(F.scaled_dot_product_attention, dropout_p=0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.kernel(*self.heads(tokens)).transpose(1, 2).flatten(2)


class BySuper(ByAlias):
    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


class Attend(nn.Module):
    """Calls torch's function in a method, if a flag says so."""

    def __init__(self, flash: bool = True) -> None:
        super().__init__()
        self.flash = flash

    def attend_fast(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.flash:
            return self.attend_fast(query, key, value)
        return scaled_products(query, key, value)


class ByChild(Base):
    def __init__(self, flash: bool = True) -> None:
        super().__init__()
        self.attend = Attend(flash)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.attend(*self.heads(tokens)).transpose(1, 2).flatten(2)


class ByTable(Base):
    """Looks its function up, so that no name leads there."""

    functions = {"torch": [attend], "own": [scaled_products]}  # noqa: RUF012

    def __init__(self, which: str = "torch") -> None:
        super().__init__()
        self.which = which

    def forward(self, tokens: Tensor) -> Tensor:
        return self.functions[self.which][0](*self.heads(tokens)).transpose(1, 2).flatten(2)


class ByHand(Base):
    """Has its own function of torch's name, and a forward around it that others share."""

    @staticmethod
    def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_products(query, key, value)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scaled_dot_product_attention(*self.heads(tokens)).transpose(1, 2).flatten(2)


class Unrelated(ByAlias):
    """Overrides what its base calls torch's function in, and names another `forward`."""

    def forward(self, tokens: Tensor) -> Tensor:
        return scaled_products(*self.heads(self.qkv.forward(tokens)[..., :24])).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("build", [ByAlias, ByFunction, ByMethod, ByAttribute, BySuper, ByChild])
def test_names_are_followed_to_torchs_function(build: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(build()).eval()
    wanted = model(TOKENS)
    path = "0.attend" if build is ByChild else "0"
    assert list(replace_attention(model, "softmax")) == [path]
    torch.testing.assert_close(model(TOKENS), wanted)
    replace_attention(model, "linear_elu")
    assert not torch.allclose(model(TOKENS), wanted, atol=1e-3)
    replace_attention(model, "softmax")
    torch.testing.assert_close(model(TOKENS), wanted)


@pytest.mark.parametrize("build", [lambda: ByChild(flash=False), ByTable, ByHand, Unrelated])
def test_what_does_not_call_torchs_function_is_not_found(build: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(build())
    with pytest.raises(LookupError, match="no supported attention"):
        replace_attention(model, "linear_elu")


def test_a_path_in_full_is_taken_at_its_word(tmp_path: object) -> None:
    model = nn.Sequential(ByTable(), nn.Linear(24, 24), ByTable("own")).eval()
    wanted = model(TOKENS)
    assert list(replace_attention(model, "softmax", "0")) == ["0"]
    torch.testing.assert_close(model(TOKENS), wanted)
    replace_attention(model, "linear_elu", "0")
    changed = model(TOKENS)
    assert not torch.allclose(changed, wanted, atol=1e-3)
    save_recipe(model, tmp_path)
    again = nn.Sequential(ByTable(), nn.Linear(24, 24), ByTable("own")).eval()
    again.load_state_dict(model.state_dict())
    apply_recipe(again, tmp_path)
    torch.testing.assert_close(again(TOKENS), changed)
    replace_attention(model, "linear_elu", "2")
    with pytest.raises(ValueError, match=r"ByTable with linear_elu: .*scaled_dot_product_attention.*; fix: "):
        model(TOKENS)


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("**.self_attn", ["layers.0.self_attn", "layers.1.self_attn"]),
        ("layers.**", ["layers.0.self_attn", "layers.1.self_attn"]),
        ("**.1.**.self_attn", ["layers.1.self_attn"]),
    ],
)
def test_two_stars_are_any_number_of_segments(where: str, paths: list[str]) -> None:
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True)
    assert list(replace_attention(nn.TransformerEncoder(layer, 2), "linear_elu", where)) == paths


@pytest.mark.parametrize("where", ["*", "1", ["0", "1"]])
def test_patterns_and_layers_of_torch_are_looked_at(where: str | list[str]) -> None:
    model = nn.Sequential(ByTable("own"), nn.Linear(24, 24))
    with pytest.raises(LookupError, match="no supported attention"):
        replace_attention(model, "linear_elu", where)
    assert type(model[0]) is ByTable
