"""Masks of replaced attention: sequences packed into one, each with its own summary, and what counts as masked."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from farfield import maps, replace_attention
from farfield.insertion._replace.learned import add_local
from helpers.grids import seeded_generator
from helpers.token_products import EPS, ROWS, product, relative, worst_gradient


class Attention(nn.Module):
    num_heads, head_dim = 2, 3

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18, dtype=torch.float64)

    def heads(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(tokens).unflatten(2, (3, 2, 3)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        response = F.scaled_dot_product_attention(*self.heads(tokens), attn_mask=mask)
        return response.transpose(1, 2).flatten(2)


def packed(numbers: Tensor) -> Tensor:
    """Return the pairs `(b, 1, n, n)` of tokens of one number; of a token whose number is negative there is none."""
    same = numbers[:, :, None] == numbers[:, None]
    return (same & (numbers >= 0)[:, None] & (numbers >= 0)[:, :, None])[:, None]


def by_block(row: str, module: Attention, tokens: Tensor, numbers: Tensor) -> Tensor:
    """The responses `(b, n, c)` of each block alone, by the products of the papers' matrices."""
    query, key, value = module.heads(tokens)
    responses = torch.zeros_like(query)
    for sample, of_tokens in enumerate(numbers):
        for number in set(of_tokens[of_tokens >= 0].tolist()):
            at = (of_tokens == number).nonzero()[:, 0]
            parts = (each[sample : sample + 1, :, at] for each in (query, key, value))
            responses[sample, :, at] = product(row, *parts, scale=3**-0.5)[0]
    return responses.transpose(1, 2).flatten(2)


NUMBERS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [4, 2, 4, 2, 2, -1, 4]])


def module_of(row: str) -> tuple[Attention, Tensor]:
    torch.manual_seed(3)
    module = Attention()
    replace_attention(module, row)
    return module, torch.randn(2, 7, 6, dtype=torch.float64, generator=seeded_generator(4))


@pytest.mark.parametrize("form", ["boolean", "additive", "half"])
@pytest.mark.parametrize("row", ROWS)
def test_each_block_attends_within_itself(row: str, form: str) -> None:
    module, tokens = module_of(row)
    tokens.requires_grad_()
    mask = packed(NUMBERS)
    if form != "boolean":
        dtype = torch.bfloat16 if form == "half" else torch.float64
        mask = ((~mask).to(dtype) * (-10_000 if form == "half" else torch.finfo(dtype).min)).double()
    wanted, found = by_block(row, module, tokens, NUMBERS), module(tokens, mask)
    assert relative(found, wanted) < 100 * EPS
    assert worst_gradient(found, wanted, [tokens, *module.parameters()]) < 1000 * EPS


@pytest.mark.parametrize("row", ["linear_elu", "softmax", "factorized"])
def test_gradients_of_gradients(row: str) -> None:
    module, tokens = module_of(row)
    run = lambda given: module(given, packed(NUMBERS)[1:])  # noqa: E731
    assert torch.autograd.gradgradcheck(run, tokens[1:].requires_grad_())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 3), min_size=9, max_size=9), min_size=1, max_size=3), st.sampled_from(ROWS))
def test_any_blocks(drawn: list[list[int]], row: str) -> None:
    module, _ = module_of(row)
    numbers = torch.tensor(drawn)
    tokens = torch.randn(len(drawn), 9, 6, dtype=torch.float64, generator=seeded_generator(5))
    valid = numbers >= 0
    wanted, found = by_block(row, module, tokens, numbers), module(tokens, packed(numbers))
    # A token of no block is padding, whose response is never read.
    torch.testing.assert_close(found[valid], wanted[valid])


def test_a_block_alone_and_its_neighbours_contents() -> None:
    module, tokens = module_of("hedgehog")
    with torch.no_grad():
        found, other = module(tokens, packed(NUMBERS)), tokens.clone()
        torch.testing.assert_close(module(tokens[:1, 3:]), found[:1, 3:])
        other[0, 3:] = torch.nan
        assert torch.equal(module(other, packed(NUMBERS))[0, :3], found[0, :3])


def test_a_local_branch_stays_within_its_block() -> None:
    module, tokens = module_of("linear_elu")
    add_local(module, 3)
    nn.init.normal_(module.local_kernel)
    with torch.no_grad():
        found = module(tokens, packed(NUMBERS))
        torch.testing.assert_close(torch.cat([module(tokens[:1, :3]), module(tokens[:1, 3:])], 1), found[:1])


def test_pairs_and_padding_of_torch_and_its_matrix() -> None:
    module = nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)
    tokens, padding = torch.randn(2, 7, 6, dtype=torch.float64), torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5] = padding[0, 2] = True
    same = packed(NUMBERS[:1])[0, 0]
    kept = {"key_padding_mask": padding, "attn_mask": ~same, "need_weights": True, "average_attn_weights": False}
    wanted, weights = module(tokens, tokens, tokens, **kept)
    replace_attention(module, "softmax")
    found, matrix = module(tokens, tokens, tokens, **kept)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(matrix, weights)
    replace_attention(module, "linear_elu")
    found, matrix = module(tokens, tokens, tokens, **kept)
    assert torch.equal(matrix != 0, (same & ~padding[:, None])[:, None].expand(2, 2, 7, 7))
    torch.testing.assert_close(matrix.sum(-1), torch.ones(2, 2, 7, dtype=torch.float64))


def test_other_masks_of_pairs_are_refused() -> None:
    module, tokens = module_of("linear_elu")
    window = (torch.arange(7)[:, None] - torch.arange(7)).abs() < 3
    by_head = torch.stack([packed(NUMBERS)[0, 0], packed(NUMBERS)[1, 0]])[None]
    for mask in (torch.ones(7, 7).tril().bool(), window, packed(NUMBERS) & window, by_head):
        with pytest.raises(ValueError, match="the mask differs between queries or heads"):
            module(tokens, mask)


def test_packed_texts_of_an_encoder() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    words, positions = torch.arange(2, 9)[None], torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    mask = packed(NUMBERS[:1])
    wanted = model(words, attention_mask=mask, position_ids=positions).last_hidden_state
    replace_attention(model, "softmax")
    torch.testing.assert_close(model(words, attention_mask=mask, position_ids=positions).last_hidden_state, wanted)
    replace_attention(model, "linear_elu")
    found = model(words, attention_mask=mask, position_ids=positions).last_hidden_state
    alone = [model(each).last_hidden_state for each in (words[:, :3], words[:, 3:])]
    torch.testing.assert_close(found, torch.cat(alone, 1))
    ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    torch.testing.assert_close(model(words, position_ids=positions, **lengths).last_hidden_state, found)
    layers = maps.layers(model, words, mask, None, positions)
    assert {len(layer.grid) for layer in layers.values()} == {2}
