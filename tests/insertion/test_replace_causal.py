"""Causal calls of replaced attention: each query sees its own prefix alone, by the operators that have a state."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from monai.networks.blocks.selfattention import SABlock
from torch import Tensor, nn

from farfield import maps, replace_attention
from farfield.insertion import linearize
from farfield.nn.token_attention import attend_tokens
from farfield.ops import OPERATORS
from helpers.explaining import explains
from helpers.prefixes import ROWS, loops

MAPS = {"hedgehog": ("query_map", "key_map")}


class Decoder(nn.Module):
    """Calls torch's function as decoders do; fewer heads of keys, if asked for."""

    def __init__(self, groups: int = 4, *, causal: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.groups, self.causal = 4, 8, groups, causal
        self.qkv = nn.Linear(32, 8 * (4 + 2 * groups))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, `(b, h, n, d)`."""
        heads = self.qkv(x).unflatten(2, (-1, 8)).transpose(1, 2)
        return heads.split([4, self.groups, self.groups], 1)

    def forward(self, x: Tensor, kept: int = 0) -> Tensor:
        q, k, v = self.split(x)
        options = {"is_causal": self.causal, "enable_gqa": self.groups < 4}
        return F.scaled_dot_product_attention(q[:, :, kept:], k, v, **options).transpose(1, 2).flatten(2)


def prefixes(row: str, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None = None) -> Tensor:
    """Causal attention of `(b, h, n, d)` in loops, `(b, n, h·d)`."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return loops(row, *(x.mT.flatten(1, 2) for x in (q, k, v)), q.shape[1], weight).mT


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("row", ROWS)
def test_a_causal_call_of_torchs_function(row: str, groups: int) -> None:
    net, x = nn.Sequential(Decoder(groups)).double().eval(), torch.randn(2, 70, 32, dtype=torch.float64)
    assert list(replace_attention(net, row)) == ["0"]
    q, k, v = net[0].split(x)
    if row == "hedgehog":
        for name in MAPS[row]:
            nn.init.normal_(getattr(net[0], name))
        k = k.repeat_interleave(4 // groups, 1)
        q, k = q @ net[0].query_map.mT, k @ net[0].key_map.mT
        v = v.repeat_interleave(4 // groups, 1)
    torch.testing.assert_close(net(x), prefixes(row, q, k, v), rtol=1e-12, atol=1e-12)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other(x), net(x))


def test_the_same_layer_without_the_order_is_as_before() -> None:
    net, x = nn.Sequential(Decoder(causal=False)).eval(), torch.randn(2, 9, 32)
    replace_attention(net, "linear_elu")
    want, _ = attend_tokens(OPERATORS["linear_elu"], *net[0].split(x), None, scale=1.0)
    assert torch.equal(net(x), want.flatten(2))


@pytest.mark.parametrize("row", ["linear_elu", "inline"])
def test_an_encoder_of_torch_with_a_causal_mask(row: str) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 16, 0.0, batch_first=True), 1).double().eval()
    replace_attention(encoder, row)
    layer, attention = encoder.layers[0], encoder.layers[0].self_attn
    x, valid = torch.randn(2, 70, 32, dtype=torch.float64), torch.ones(2, 70, dtype=torch.bool)
    valid[1, 50:] = False
    mask = nn.Transformer.generate_square_subsequent_mask(70, dtype=torch.float64)
    q, k, v = (heads.unflatten(2, (4, 8)).transpose(1, 2) for heads in attention.project(x, x, x))
    response = attention.out_proj(prefixes(row, q, k, v, valid.double()))
    want = layer.norm1(x + response)
    want = layer.norm2(want + layer.linear2(layer.linear1(want).relu()))
    padding = torch.zeros(2, 70, dtype=torch.float64).masked_fill(~valid, -torch.inf)
    got = encoder(x, mask, src_key_padding_mask=padding)
    torch.testing.assert_close(got[valid], want[valid], rtol=1e-12, atol=1e-12)
    bias = torch.randn(2, 70, dtype=torch.float64)  # of keys: the logarithm of their weights
    biased = attention(x, x, x, attn_mask=mask, key_padding_mask=bias, is_causal=True, need_weights=False)[0]
    own = attention.out_proj(prefixes(row, q, k, v, bias.exp()))
    torch.testing.assert_close(biased, own, rtol=1e-12, atol=1e-12)
    response, weights = attention(x, x, x, attn_mask=mask, is_causal=True, average_attn_weights=False)
    assert torch.equal(weights, weights.tril())
    own = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(response, own, rtol=1e-12, atol=1e-12)


def test_a_causal_block_of_monai() -> None:
    block, x = SABlock(32, 4, causal=True, sequence_length=70).double().eval(), torch.randn(2, 70, 32).double()
    original = block(x)
    replace_attention(block, "mala")
    q, k, v = (heads.unflatten(2, (4, 8)).transpose(1, 2) for heads in block.qkv(x).chunk(3, -1))
    torch.testing.assert_close(block(x), block.out_proj(prefixes("mala", q, k, v)), rtol=1e-12, atol=1e-12)
    replace_attention(block, "softmax")
    torch.testing.assert_close(block(x), original, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", ["linear_elu", "softmax"])
def test_dropout_leaves_each_position_its_prefix(row: str) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 16, 0.5, batch_first=True), 1)
    replace_attention(encoder, row)
    x, mask = torch.randn(2, 20, 32), nn.Transformer.generate_square_subsequent_mask(20)
    outputs = []
    for each in (x, torch.cat([x[:, :9], 3 * x[:, 9:]], 1)):
        torch.manual_seed(0)
        outputs.append(encoder(each, mask)[:, :9])
    assert torch.equal(*outputs)


def test_a_causal_model_is_trained_to_the_same_features() -> None:
    """The local branch of a causal attention ends at each position."""
    torch.manual_seed(0)
    net = nn.Sequential(Decoder())
    inputs = [torch.randn(4, 12, 32) for _ in range(3)]
    linearize(net, "linear_elu", inputs, local=3, steps=3, quiet=True)
    nn.init.normal_(net[0].local_kernel)
    x = inputs[0]
    later = torch.cat([x[:, :5], 2 * x[:, 5:]], 1)
    assert torch.equal(net(x)[:, :5], net(later)[:, :5])
    q, k, v = net[0].split(x)
    values = v.mT.flatten(1, 2)
    branch = F.conv1d(F.pad(values, (2, 0)), net[0].local_kernel, groups=32).mT
    torch.testing.assert_close(net(x), (prefixes("linear_elu", q, k, v) + branch), rtol=1e-4, atol=1e-4)


def test_softmax_is_torchs_own() -> None:
    """With weights of keys too, a row of the matrix at a time, and queries without a key."""
    net, x = nn.Sequential(Decoder(2)).double().eval(), torch.randn(2, 9, 32, dtype=torch.float64)
    wanted = net(x)
    replace_attention(net, "softmax")
    torch.testing.assert_close(net(x), wanted, rtol=1e-12, atol=1e-12)
    q, k, v = torch.randn(3, 2, 2, 9, 4, dtype=torch.float64)
    weight = torch.rand(2, 1, 1, 9, dtype=torch.float64) * (torch.arange(9) > 2)
    options = {"scale": 0.5, "causal": True}
    found, matrix = attend_tokens(OPERATORS["softmax"], q, k, v, weight, **options, weights=True)
    for place in range(9):
        terms = weight[:, :, 0, : place + 1] * (0.5 * k[:, :, : place + 1] @ q[:, :, place, :, None])[..., 0].exp()
        row = terms / terms.sum(-1, keepdim=True) if place > 2 else torch.zeros_like(terms)
        torch.testing.assert_close(matrix[:, :, place, : place + 1], row, rtol=1e-12, atol=1e-12)
    assert torch.equal(matrix, matrix.tril())
    torch.testing.assert_close(found, (matrix @ v).transpose(1, 2), rtol=1e-12, atol=1e-12)
    alone, _ = attend_tokens(OPERATORS["softmax"], q, k, v, weight, **options)
    torch.testing.assert_close(alone, found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", sorted({"dot", "factorized_gaussian", "siamese", "flare"}))
def test_operators_without_a_state_are_refused(row: str) -> None:
    net = nn.Sequential(Decoder()).eval()
    replace_attention(net, row)
    with explains(ValueError, f"Decoder with {row}", "causal", *ROWS):
        net(torch.randn(2, 9, 32))


def test_keys_of_earlier_calls_are_refused() -> None:
    net = Decoder().eval()
    replace_attention(net, "linear_elu")
    with explains(ValueError, "Decoder with linear_elu", 1, 9, "cache"):
        net(torch.randn(2, 9, 32), kept=8)


def test_maps_of_causal_attention_are_refused() -> None:
    net = nn.Sequential(Decoder()).eval()
    replace_attention(net, "linear_elu")
    with explains(ValueError, "maps.layers", "causal"):
        maps.layers(net, torch.randn(2, 9, 32))


def test_a_causal_layer_compiles() -> None:
    net, x = nn.Sequential(Decoder()).eval(), torch.randn(2, 70, 32)
    replace_attention(net, "linear_elu")
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), net(x))
