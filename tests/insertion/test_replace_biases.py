"""A bias that is one number for each key is its weight: quadrature of a sphere, sizes of merged tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import maps, ops, replace_attention
from farfield.insertion._replace.masks import find_obstacle
from farfield.ops import OPERATORS
from farfield.streaming import predict_whole
from helpers.grids import assert_close

ROWS = [row for row, operator in OPERATORS.items() if find_obstacle(operator) is None and operator.score != "latents"]
MATERIALIZED = ("expanded", "materialized", "of padding")


class Attention(nn.Module):
    """Attention by torch's function, with a mask as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads, self.head_dim = nn.Linear(12, 36), 3, 4

    def split(self, tokens: Tensor) -> Tensor:
        return self.qkv(tokens).unflatten(2, (3, 3, 4)).permute(2, 0, 3, 1, 4)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        response = F.scaled_dot_product_attention(*self.split(tokens), attn_mask=mask)
        return response.transpose(1, 2).flatten(2)


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        response: Tensor = self.attn(tokens, mask)
        return response


def _given(form: str = "expanded") -> tuple[Host, Tensor, Tensor, Tensor]:
    """A host, tokens, a bias of keys, of which one is padding, and the mask that is made of it."""
    torch.manual_seed(0)
    host, tokens, bias = Host().double().eval(), torch.randn(2, 7, 12).double(), torch.randn(2, 7).double()
    bias[1, 5:] = -torch.inf
    mask = bias[:, None, None]
    if form != "expanded":
        mask = mask.expand(2, 3, 7, 7).clone()
    if form == "of padding":  # queries of padding attend to nothing
        mask[1, :, 5:] = -1e9
    return host, tokens, bias, mask


@pytest.mark.parametrize("form", MATERIALIZED)
def test_softmax_is_what_it_was(form: str) -> None:
    host, tokens, bias, mask = _given(form)
    attending = bias > -torch.inf
    want = host(tokens, mask)[attending]
    replace_attention(host, "softmax")
    assert_close(host(tokens, mask)[attending], want)


@pytest.mark.parametrize("form", MATERIALIZED)
@pytest.mark.parametrize("row", ROWS)
def test_each_operator_takes_the_exponential_as_the_weight(row: str, form: str) -> None:
    host, tokens, bias, mask = _given(form)
    replace_attention(host, row)
    query, key, value = (each.mT.flatten(1, 2) for each in host.attn.split(tokens))
    learned = {name: getattr(host.attn, name) for name in OPERATORS[row].parameter_shapes(12, 3)}
    scale = {"scale": 0.5} if OPERATORS[row].has_scale else {}
    want = getattr(ops, f"{row}_attention")(query, key, value, heads=3, key_weight=bias.exp(), **learned, **scale)
    assert_close(host(tokens, mask), want.mT)


@pytest.mark.parametrize("row", ["softmax", "factorized_gaussian", "averaged"])
def test_tokens_that_were_merged_are_as_many_equal_ones(row: str) -> None:
    host, tokens, _, _ = _given()
    replace_attention(host, row)
    sizes = torch.tensor([1, 3, 1, 2, 1, 1, 4])
    want = host(tokens.repeat_interleave(sizes, 1))
    first = sizes.cumsum(0) - sizes
    assert_close(host(tokens, sizes.double().log().expand(2, 1, 1, 7)), want[:, first])


@pytest.mark.parametrize("row", ["softmax", "factorized_gaussian"])
def test_multihead_attention_has_the_matrix_of_weights_too(row: str) -> None:
    _, tokens, bias, _ = _given()
    attention = nn.MultiheadAttention(12, 3, batch_first=True).double().eval()
    want = attention(tokens, tokens, tokens, key_padding_mask=bias)
    replace_attention(attention, row)
    response, matrix = attention(tokens, tokens, tokens, key_padding_mask=bias)
    value = F.linear(tokens, attention.in_proj_weight[24:], attention.in_proj_bias[24:]).unflatten(2, (3, 4))
    each = attention(tokens, tokens, tokens, key_padding_mask=bias, average_attn_weights=False)[1]
    assert_close(matrix, each.mean(1))
    assert_close(response, attention.out_proj((each @ value.transpose(1, 2)).transpose(1, 2).flatten(2)))
    if row == "softmax":
        assert_close(response, want[0])
        assert_close(matrix, want[1])
    alone = attention(tokens, tokens, tokens, key_padding_mask=bias, need_weights=False)[0]
    assert_close(alone, response)
    both = {"key_padding_mask": bias, "attn_mask": torch.zeros(7, 7).double(), "need_weights": False}
    assert_close(attention(tokens, tokens, tokens, **both)[0], response)


def test_a_bias_that_is_learned_has_its_gradient() -> None:
    host, tokens, bias, _ = _given()
    bias = bias.clamp_min(-3).requires_grad_()
    wanted = torch.autograd.grad(host(tokens, bias[:, None, None]).square().sum(), bias)[0]
    replace_attention(host, "softmax")
    assert_close(torch.autograd.grad(host(tokens, bias[:, None, None]).square().sum(), bias)[0], wanted)
    mask = bias[:, None, None].expand(2, 3, 7, 7)
    assert_close(torch.autograd.grad(host(tokens, mask).square().sum(), bias)[0], wanted)


@pytest.mark.parametrize(
    "mask",
    [
        torch.randn(7, 7).double(),
        torch.randn(2, 3, 1, 7).double(),
        torch.zeros(7, 7).double().requires_grad_(),
        torch.full((2, 1, 1, 7), 1e4).double(),
        torch.full((2, 1, 1, 7), torch.nan).double(),
    ],
    ids=["of pairs", "of heads", "of pairs that are learned", "beyond all numbers", "no number"],
)
def test_other_biases_are_refused(mask: Tensor) -> None:
    host, tokens, _, _ = _given()
    replace_attention(host, "linear_elu")
    with pytest.raises(ValueError, match=r"the mask adds a bias .* that is not one of each key, .*; fix: leave this"):
        host(tokens, mask)


def test_maps_of_a_call_with_weights_are_refused() -> None:
    host, tokens, _, mask = _given()
    replace_attention(host, "linear_elu")
    with pytest.raises(ValueError, match="called with weights of keys, and its maps have none"):
        maps.layers(host, tokens, mask)


@pytest.mark.parametrize("row", ["softmax", "factorized_gaussian", "averaged"])
def test_tiles_of_a_network_with_a_bias_of_keys(row: str) -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.host = nn.Conv2d(1, 12, 3, padding=1), Host()
            self.register_buffer("bias", torch.randn(1, 1, 1, 12 * 16))

        def forward(self, image: Tensor) -> Tensor:
            grid = self.enter(image)
            return self.host(grid.flatten(2).mT, self.bias).mT.unflatten(2, grid.shape[2:])

    network, image = Image().double().eval(), torch.randn(1, 1, 12, 16).double()
    replace_attention(network, row)
    assert_close(torch.as_tensor(predict_whole(network, image, tile=8)), network(image).detach(), 1e-12)
