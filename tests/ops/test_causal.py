"""Causal attention is, at each position, attention to the positions up to it: loops over prefixes, states, streams."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from farfield import ShapeError, ops
from farfield.ops import OPERATORS, Operator, Summary, causal, causal_attention
from helpers.explaining import explains
from helpers.grids import assert_close, draw_learned
from helpers.partly import pairwise
from helpers.prefixes import ROWS, loops
from helpers.seeding import seeded_generator

OTHERS = tuple(row for row in OPERATORS if row not in ROWS)


def draw(length: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys and values of two samples, of 4, 4 and 6 channels."""
    generator = seeded_generator(seed)
    return [torch.randn(2, c, length, dtype=torch.float64, generator=generator).to(dtype) for c in (4, 4, 6)]


@pytest.mark.parametrize(
    *pairwise(row=ROWS, length=(1, 2, 63, 64, 65, 150), heads=(1, 2), weighed=("all", "masked", "weights"))
)
def test_each_response_is_that_of_its_prefix(row: str, length: int, heads: int, weighed: str) -> None:
    tensors = [x.requires_grad_() for x in draw(length)]
    mask = torch.rand(2, length, generator=seeded_generator(1)) > 0.4 if weighed == "masked" else None
    weight = None
    if weighed == "weights":
        weight = (3 * torch.rand(2, length, dtype=torch.float64, generator=seeded_generator(2))).requires_grad_()
        tensors.append(weight)
    got, state = causal_attention(row, *tensors[:3], heads=heads, mask=mask, key_weight=weight)
    query = tensors[0] if mask is None else tensors[0] * mask[:, None]  # the query of a masked position is read as 0
    want = loops(row, query, *tensors[1:3], heads, mask.double() if mask is not None else weight)
    assert got.dtype == torch.float64
    assert_close(got, want, 1e-14)
    assert state.values.shape[:2] == (2, heads)
    cotangent = torch.randn(got.shape, dtype=got.dtype, generator=seeded_generator(3))
    ours, theirs = (torch.autograd.grad(x, tensors, cotangent) for x in (got, want))
    largest = max(float(x.norm()) for x in theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).norm()) <= 1e-12 * max(float(other.norm()), 1e-2 * largest)


@pytest.mark.parametrize("row", ROWS)
def test_the_last_position_responds_as_the_operator_does(row: str) -> None:
    q, k, v = draw(130)
    learned = {name: torch.eye(2, dtype=q.dtype).expand_as(x) for name, x in draw_learned(row, 4, 2).items()}
    whole = getattr(ops, f"{row}_attention")(q[..., -1:], k, v, heads=2, **learned)
    assert_close(causal_attention(row, q, k, v, heads=2)[0][..., -1:], whole, 1e-14)


@pytest.mark.parametrize("row", ROWS)
def test_first_and_second_derivatives(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal, "CHUNK", 2)
    monkeypatch.setattr(causal, "BLOCK", 4)
    before = [x[:1, :2].detach() for x in draw(3, 5)]
    # Positive, as the derivative of relu has a step at 0.
    given = [(x[:1, :2].abs() + 0.1).requires_grad_() for x in draw(5)]
    weight = (torch.rand(1, 5, dtype=torch.float64) + 0.5).requires_grad_()

    def stream(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        state = causal_attention(row, *before)[1]
        return causal_attention(row, q, k, v, state=state, key_weight=w)[0]

    assert torch.autograd.gradcheck(stream, (*given, weight))
    assert torch.autograd.gradgradcheck(stream, (*given, weight))


# ---- streams ---------------------------------------------------------------------------------------------------------
def in_parts(row: str | Operator, parts: Sequence[Sequence[Tensor]], **options: Sequence[Tensor]) -> tuple:
    """The responses of a stream that comes in parts, and the state after the last."""
    responses, state = [], None
    for place, part in enumerate(parts):
        own = {name: given[place] for name, given in options.items()}
        response, state = causal_attention(row, *part, heads=2, state=state, **own)
        responses.append(response)
    return torch.cat(responses, -1), state


@given(
    row=st.sampled_from(ROWS),
    lengths=st.lists(st.integers(1, 130), min_size=1, max_size=5),
    masked=st.booleans(),
    weighed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_parts_of_a_stream_are_the_whole(row: str, lengths: list[int], masked: bool, weighed: bool, seed: int) -> None:
    q, k, v = draw(sum(lengths), seed)
    generator, options = seeded_generator(seed + 1), {}
    if masked:
        options["mask"] = torch.rand(2, sum(lengths), generator=generator) > 0.3
    if weighed:
        options["key_weight"] = 3 * torch.rand(2, sum(lengths), generator=generator, dtype=torch.float64)
    whole, last = causal_attention(row, q, k, v, heads=2, **options)
    parts = list(zip(*(x.split(lengths, -1) for x in (q, k, v)), strict=True))
    responses, state = in_parts(row, parts, **{name: x.split(lengths, -1) for name, x in options.items()})
    assert_close(responses, whole, 1e-13)
    for one, other in zip(state[:3], last[:3], strict=True):
        assert_close(one, other, 1e-13)


@pytest.mark.parametrize("row", ROWS)
def test_one_position_at_a_time(row: str) -> None:
    q, k, v = draw(70)
    steps = list(zip(*(x.split(1, -1) for x in (q, k, v)), strict=True))
    assert_close(in_parts(row, steps)[0], causal_attention(row, q, k, v, heads=2)[0], 1e-14)


@given(row=st.sampled_from(ROWS), lengths=st.lists(st.integers(1, 90), min_size=2, max_size=7), tree=st.data())
def test_states_merge_in_any_grouping(row: str, lengths: list[int], tree: st.DataObject) -> None:
    q, k, v = draw(sum(lengths) + 30)
    parts = list(zip(*(x.split([*lengths, 30], -1) for x in (q, k, v)), strict=True))
    states = [causal_attention(row, *part, heads=2)[1] for part in parts[:-1]]
    while len(states) > 1:
        place = tree.draw(st.integers(0, len(states) - 2))
        states[place : place + 2] = [states[place].merge(states[place + 1])]
    got = causal_attention(row, *parts[-1], heads=2, state=states[0])[0]
    assert_close(got, causal_attention(row, q, k, v, heads=2)[0][..., -30:], 1e-13)


@pytest.mark.parametrize("row", ROWS)
def test_a_state_is_the_summary_of_the_stream(row: str) -> None:
    """What `GridAttention` and `ops.summarize` make merges with it, and `ops.respond` takes it."""
    q, k, v = (x.unflatten(1, (2, -1)) for x in draw(100))
    state = causal_attention(row, *(x.flatten(1, 2) for x in (q, k, v)), heads=2)[1]
    summary = ops.summarize(OPERATORS[row], k, v, torch.ones(2, 1, 1, 100, dtype=torch.float64))
    for one, other in zip(state[:3], summary[:3], strict=True):
        assert_close(one, other, 1e-14)
    assert_close(ops.respond(OPERATORS[row], q, state), ops.respond(OPERATORS[row], q, summary), 1e-13)
    state.merge(summary)


@pytest.mark.parametrize("row", ROWS)
def test_later_positions_change_nothing(row: str) -> None:
    tensors = [x.requires_grad_() for x in draw(100)]
    other = [torch.cat([x[..., :50], 9 * x[..., 50:]], -1) for x in tensors]
    first = causal_attention(row, *tensors)[0][..., :50]
    assert torch.equal(first, causal_attention(row, *other)[0][..., :50])
    for gradient in torch.autograd.grad(first.square().sum(), tensors):
        assert torch.equal(gradient[..., 50:], torch.zeros_like(gradient[..., 50:]))


def test_a_state_is_saved_and_loaded(tmp_path: Path) -> None:
    q, k, v = draw(1000, dtype=torch.float32)
    state = causal_attention("mala", *(x[..., :900] for x in (q, k, v)))[1]
    torch.save(state._asdict(), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 4000  # and no numbers of each position
    loaded = Summary(**torch.load(tmp_path / "state.pt", weights_only=True))
    rest = [x[..., 900:] for x in (q, k, v)]
    assert torch.equal(
        causal_attention("mala", *rest, state=loaded)[0], causal_attention("mala", *rest, state=state)[0]
    )
    torch.save(state, buffer := io.BytesIO())
    buffer.seek(0)
    with torch.serialization.safe_globals([Summary]):
        assert torch.equal(torch.load(buffer, weights_only=True).values, state.values)


def test_gradients_flow_through_a_state_until_it_is_detached() -> None:
    q, k, v = (x.requires_grad_() for x in draw(80))
    want = torch.autograd.grad(causal_attention("linear_elu", q, k, v)[0][..., 30:].sin().sum(), k)[0]
    parts = [[x[..., :30] for x in (q, k, v)], [x[..., 30:] for x in (q, k, v)]]
    state = causal_attention("linear_elu", *parts[0])[1]
    assert_close(torch.autograd.grad(causal_attention("linear_elu", *parts[1], state=state)[0].sin().sum(), k)[0], want)
    state = state.detach()
    assert isinstance(state, Summary)
    (cut,) = torch.autograd.grad(causal_attention("linear_elu", *parts[1], state=state)[0].sin().sum(), k)
    assert torch.equal(cut[..., :30], torch.zeros_like(cut[..., :30]))
    assert_close(cut[..., 30:], want[..., 30:])


def test_the_page_of_streams_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "streams.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert isinstance(names["state"], Summary)


# ---- masks and weights -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", ROWS)
def test_masked_positions_may_hold_anything(row: str) -> None:
    mask = torch.rand(2, 100, generator=seeded_generator(4)) > 0.4
    mask[1] = False
    zeros, nans = ([torch.where(mask[:, None], x, fill) for x in draw(100)] for fill in (0.0, torch.nan))
    leaves = [x.requires_grad_() for x in nans]
    got, state = causal_attention(row, *leaves, mask=mask)
    want, without = causal_attention(row, *zeros, mask=mask)
    assert torch.equal(got, want)
    assert torch.equal(got[1], torch.zeros_like(got[1]))
    assert all(map(torch.equal, state[:3], without[:3]))
    for gradient in torch.autograd.grad(got.square().sum(), leaves):
        assert torch.equal(gradient, torch.where(mask[:, None], gradient, 0))


@pytest.mark.parametrize("row", ROWS)
def test_a_weight_is_so_many_equal_keys(row: str) -> None:
    q, k, v = (x[:1] for x in draw(90))
    times = torch.randint(0, 4, (90,), generator=seeded_generator(6))
    times[-1] = 2
    repeated = [x.repeat_interleave(times, -1) for x in (q, k, v)]
    want = causal_attention(row, *repeated, heads=2)[0][..., times.cumsum(0)[times > 0] - 1]
    got = causal_attention(row, q, k, v, heads=2, key_weight=times[None].double())[0][..., times > 0]
    assert_close(got, want, 1e-13)


@pytest.mark.parametrize("row", [row for row in ROWS if row not in ("factorized", "linear_relu")])
def test_a_weight_of_all_keys_cancels(row: str) -> None:
    """Small ones too, with which the count is below 1; not in a sum, nor beside an ε."""
    q, k, v = draw(90)
    weight = torch.full((2, 90), 1e-3, dtype=torch.float64)
    assert_close(causal_attention(row, q, k, v, key_weight=weight)[0], causal_attention(row, q, k, v)[0], 1e-12)


# ---- precision -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row", ROWS)
def test_half_precision_is_float32_that_is_rounded_once(row: str, dtype: torch.dtype) -> None:
    q, k, v = draw(200, dtype=dtype)
    want, other = causal_attention(row, q.float(), k.float(), v.float(), heads=2)
    got, state = causal_attention(row, q, k, v, heads=2)
    assert got.dtype == dtype
    assert torch.equal(got, want.to(dtype))
    assert state.values.dtype == torch.float32
    assert all(map(torch.equal, state[:3], other[:3]))
    with torch.autocast("cpu", dtype):
        assert torch.equal(causal_attention(row, q.float(), k.float(), v.float(), heads=2)[0], want)


@pytest.mark.parametrize("parts", [1, 37])
@pytest.mark.parametrize("row", ["linear_elu", "hedgehog"])
def test_long_streams_in_float32(row: str, parts: int) -> None:
    """Weights and products of them are positive, so each error is at most one rounding an addition, of the sum."""
    q, k, v = draw(4000)
    pieces = list(zip(*(x.float().split(-(-4000 // parts), -1) for x in (q, k, v)), strict=True))
    got, _ = in_parts(row, pieces)
    want, largest = (causal_attention(row, q, k, x, heads=2)[0] for x in (v, v.abs()))
    # The additions of a product over a chunk, over chunks, over slots; those of weights over a block, over blocks and
    # slots. Rounding the inputs and the features, the quotient and its terms are ten more.
    chunks, blocks, slots = 4000 // causal.CHUNK + parts + 1, 4000 // causal.BLOCK + parts + 1, 4
    additions = (causal.CHUNK + chunks + slots) + (causal.BLOCK + blocks + slots) + 10
    bound = additions * torch.finfo(torch.float32).eps / 2
    assert float(((got - want).abs() / largest).max()) <= bound


def test_a_state_in_float64_stays_so() -> None:
    """Sums of float32 stop at 2^24 positions that come one at a time."""
    q, k, v = draw(60)
    state = causal_attention("averaged", *(x[..., :30] for x in (q, k, v)))[1]
    rest = [x[..., 30:].float() for x in (q, k, v)]
    response, state = causal_attention("averaged", *rest, state=state)
    assert (response.dtype, state.values.dtype, state.count.dtype) == (torch.float32, torch.float64, torch.float64)
    assert_close(response.double(), causal_attention("averaged", q, k, v)[0][..., 30:], 1e-6)


def test_prefixes_of_small_features_have_their_own_scale() -> None:
    """Features of exp(-80) up to a position, and of 1 from it on."""
    q, k, v = draw(64, dtype=torch.float32)
    k = torch.cat([k[..., :32] - 80, k[..., 32:]], -1)
    q = q - 40
    want = causal_attention("linear_elu", q.double(), k.double(), v.double())[0]
    assert_close(causal_attention("linear_elu", q, k, v)[0].double(), want, 1e-4)


def test_the_layout_of_the_query_is_that_of_the_response() -> None:
    q, k, v = (x.mT.contiguous().mT for x in draw(70))
    assert causal_attention("mala", q, k, v)[0].stride(1) == 1
    assert causal_attention("mala", q.contiguous(), k, v)[0].is_contiguous()


# ---- graphs ----------------------------------------------------------------------------------------------------------
class Stream(nn.Module):
    """Causal attention as a module, for `torch.export`."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.row = row

    def forward(self, q: Tensor, k: Tensor, v: Tensor, values: Tensor, weights: Tensor, count: Tensor) -> tuple:
        response, state = causal_attention(self.row, q, k, v, heads=2, state=Summary(values, weights, count))
        return response, *state[:3]


def assert_serves(graph: Callable[..., tuple], stream: Stream, before: tuple) -> None:
    for count in (150, 64, 65, 7, 200):
        for got, want in zip(graph(*draw(count), *before), stream(*draw(count), *before), strict=True):
            assert_close(got, want, 1e-13)


@pytest.mark.parametrize("row", ["linear_elu", "inline"])
def test_one_exported_program_serves_every_length(row: str) -> None:
    before = causal_attention(row, *draw(9), heads=2)[1][:3]
    length = {2: torch.export.Dim("length", min=2)}
    shapes = (length, length, length, None, None, None)
    program = torch.export.export(Stream(row), (*draw(150), *before), dynamic_shapes=shapes)
    assert_serves(program.module(), Stream(row), before)


@pytest.mark.slow
@pytest.mark.unchecked("a compiler does not look through the checks")
def test_one_compiled_graph_serves_every_length() -> None:
    before = causal_attention("linear_elu", *draw(9), heads=2)[1][:3]
    torch.compiler.reset()
    compiled = torch.compile(Stream("linear_elu"), fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_serves(compiled, Stream("linear_elu"), before)


# ---- other operators, and refusals -----------------------------------------------------------------------------------
def test_an_operator_of_a_user() -> None:
    tensors = draw(90)
    own = Operator(coefficients=lambda q, summary: q.exp(), basis=lambda k, valid: (k.exp(), None))
    q, k, v = (x.unsqueeze(dim) for x, dim in zip(tensors, (2, 2, 1), strict=True))  # (b, r, c, t)
    want = (q.exp() * (k.exp() * v).cumsum(-1) / k.exp().cumsum(-1)).sum(1)
    assert_close(causal_attention(own, *tensors)[0], want, 1e-13)


@pytest.mark.unchecked("arguments of other types and shapes reach the function")
class TestRefusals:
    @pytest.mark.parametrize("row", OTHERS)
    def test_operators_without_a_state_of_prefixes(self, row: str) -> None:
        with explains(ValueError, "causal_attention", row, *ROWS):
            causal_attention(row, *draw(5))

    def test_a_basis_with_a_peak(self) -> None:
        own = Operator(coefficients=lambda q, summary: q, basis=lambda k, valid: (k, k.amax(-1, keepdim=True)))
        with explains(ValueError, "causal_attention", "largest", *ROWS):
            causal_attention(own, *draw(5))

    def test_names_that_are_not_known(self) -> None:
        with explains(LookupError, "causal_attention", "linear_elo", "linear_elu"):
            causal_attention("linear_elo", *draw(5))

    def test_positions_without_an_order(self) -> None:
        grid = torch.randn(1, 4, 3, 5)
        with explains(ShapeError, "causal_attention", "query.flatten(2)", (1, 4, 3, 5)):
            causal_attention("mala", grid, grid, grid)

    def test_lengths_that_differ(self) -> None:
        q, k, v = draw(5)
        with explains(ShapeError, "causal_attention", (2, 4, 1), (2, 4, 5), "state="):
            causal_attention("mala", q[..., -1:], k, v)

    def test_nothing(self) -> None:
        with explains(ShapeError, "causal_attention", (2, 4, 0)):
            causal_attention("mala", *draw(0))

    def test_states_of_other_streams(self) -> None:
        q, k, v = draw(5)
        state = causal_attention("mala", q, k, v)[1]
        with explains(ShapeError, "causal_attention", "heads", (2, 1, 5, 6)):
            causal_attention("mala", q, k, v, heads=2, state=state)
        with explains(ShapeError, "causal_attention", "operator", (2, 1, 5, 6)):
            causal_attention("linear_elu", q, k, v, state=state)
        k, v = (x[:, None] for x in (k, v))
        state = ops.summarize(OPERATORS["factorized_gaussian"], k, v, torch.ones(2, 1, 1, 5, dtype=torch.float64))
        with explains(ShapeError, "causal_attention", "operator", (2, 1, 4, 6)):
            causal_attention("linear_elu", q, k[:, 0], v[:, 0], state=state)
        k, v = k[:, 0], v[:, 0]
        with explains(TypeError, "causal_attention", "dict", "Summary(**content)"):
            causal_attention("mala", q, k, v, state=state._asdict())

    def test_weights_of_other_keys(self) -> None:
        q, k, v = draw(5)
        with explains(ShapeError, "causal_attention", "key_weight", (2, 4), (2, 5)):
            causal_attention("mala", q, k, v, key_weight=torch.ones(2, 4, dtype=torch.float64))
        with explains(TypeError, "causal_attention", "key_weight", "list"):
            causal_attention("mala", q, k, v, key_weight=[1.0] * 5)
        with explains(ValueError, "causal_attention", "key_weight", -1):
            causal_attention("mala", q, k, v, key_weight=torch.full((2, 5), -1.0, dtype=torch.float64))
