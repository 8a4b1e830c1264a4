"""Costs: formulas against what executes, what executes against counting by hand, measurements against known cases."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import ShapeError, cost
from farfield._operators import DEFAULT
from farfield.cost.measuring import LiveBytes
from farfield.nn import GridAttention, attention_for
from farfield.nn.macs import MacCounter
from farfield.ops import OPERATORS, Operator, flare, pooled
from farfield.ops.projection import project_queries
from farfield.ops.slots import keys, position, queries
from helpers.partly import pairwise, partly
from helpers.small_networks import SqueezeExcite

PROJECTS = ("", "v", "q", "qk", "qkv", "o", "vo", "qkvo")


def attention(row: str | Operator, channels: int = 16, **options: object) -> GridAttention:
    with torch.device("meta"):
        return GridAttention(channels, row, **options).eval()  # type: ignore[arg-type]


def projects(row: str) -> list[str]:
    """The maps that a row can have: siamese_local reads no keys."""
    return list(dict.fromkeys(OPERATORS[row].projections(project) for project in PROJECTS))


# ---- count -----------------------------------------------------------------------------------------------------------
class Small(nn.Module):
    """Every kind of counted work once, each number known."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        grid = self.norm(self.depthwise(self.convolution(image))).relu()  # (b, 8, 5, 4)
        positions = grid.flatten(2).mT  # (b, 20, 8)
        attended = F.scaled_dot_product_attention(positions, positions, positions)
        return self.linear(attended @ torch.ones(8, 8)).mean(1)


def by_hand(batch: int) -> int:
    convolution, depthwise = 20 * 8 * 3 * 9, 20 * 8 * 9
    products, attended, mixed, classified = 20 * 20 * 8, 20 * 20 * 8, 20 * 8 * 8, 20 * 8 * 5
    return batch * (convolution + depthwise + products + attended + mixed + classified)


@pytest.mark.parametrize("batch", [1, 3])
def test_count_by_hand(batch: int) -> None:
    found = cost.count(Small(), (batch, 3, 9, 7))
    assert found.macs == by_hand(batch)
    assert found.weights == 8 * 3 * 9 + 8 * 9 + 8 * 5
    assert found.parameters == found.weights + 8 + 5 + 2 * 8
    # The outputs of the convolutions and the norm, and of the linear map, in float32.
    assert found.activation_bytes == 4 * batch * (3 * 8 * 20 + 20 * 5)
    assert found.coefficients is None


def test_count_by_module() -> None:
    net = nn.Sequential(Small(), nn.Sequential(nn.Linear(5, 7), nn.ReLU()))
    found = cost.count(net, (1, 3, 9, 7))
    assert found.by_module["0"] == by_hand(1)
    assert found.by_module["0.convolution"] == 20 * 8 * 3 * 9
    assert found.by_module["1.0"] == found.by_module["1"] == 5 * 7
    assert found.macs == by_hand(1) + 35


def test_count_leaves_the_module_alone() -> None:
    net = Small().train()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in net.state_dict().items()}
    cost.count(net, (2, 3, 9, 7))
    for name, tensor in net.state_dict().items():
        address, numbers = before[name]
        assert tensor.data_ptr() == address
        assert torch.equal(tensor, numbers)
    assert net.training
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(part._forward_hooks for part in net.modules())


def test_count_takes_tensors_and_several_inputs() -> None:
    class Two(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return left @ right

    assert cost.count(Two(), [(2, 3, 4), (2, 4, 5)]).macs == 2 * 3 * 4 * 5
    assert cost.count(Two(), (torch.zeros(2, 3, 4), (2, 4, 5))).macs == 2 * 3 * 4 * 5
    words = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 2))
    assert cost.count(words, torch.zeros(1, 6, dtype=torch.long)).macs == 6 * 8 * 2
    assert cost.count(nn.Linear(8, 2).double(), (3, 8)).activation_bytes == 8 * 3 * 2


def test_count_of_a_shared_module_counts_its_parameters_once() -> None:
    linear = nn.Linear(6, 6)
    found = cost.count(nn.Sequential(linear, linear), (1, 6))
    assert (found.macs, found.weights, found.parameters) == (72, 36, 42)


@pytest.mark.long
def test_count_refuses_what_depends_on_values() -> None:
    class Peeks(nn.Module):
        def forward(self, grid: Tensor) -> Tensor:
            return grid if grid.sum().item() > 0 else -grid

    with pytest.raises(RuntimeError, match=r"cost.count: Peeks does not run on \(2, 3\) with fake tensors, which"):
        cost.count(Peeks(), (2, 3))
    with pytest.raises(RuntimeError, match=r"cost.count: Linear does not run on \(2, 3\) with fake tensors, which"):
        cost.count(nn.Linear(4, 4), (2, 3))
    with pytest.raises(ShapeError, match="grid must have the module's 16 channels"):
        cost.count(attention("averaged"), (1, 8, 5, 5))


def test_count_sees_the_moments_of_a_norm_in_training() -> None:
    module = attention("softmax", heads=4, coefficient_norm=True)
    inference, training = cost.count(module, (2, 16, 6, 6)).macs, cost.count(module.train(), (2, 16, 6, 6)).macs
    assert inference == cost.predict(module, size=(6, 6), batch=2).macs < training
    # Never the N x N matrix: the difference grows with the positions, not with their square.
    larger = cost.count(module, (2, 16, 12, 12)).macs - cost.predict(module, size=(12, 12), batch=2).macs
    assert larger < 5 * (training - inference)


def test_costs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.predict("dot", channels=8, size=(4,)).macs = 0  # type: ignore[misc]


# ---- predict: the formula is what executes ---------------------------------------------------------------------------
SIZE = ((9,), (5, 6), (4, 3, 5))


@pytest.mark.parametrize("heads", partly([1, 4], [4]))
@pytest.mark.parametrize("row", OPERATORS)
def test_the_formula_is_what_executes(row: str, heads: int) -> None:
    for project, size in itertools.product(projects(row), SIZE):
        module = attention(row, heads=heads, project=project)
        counted = cost.count(module, (3, 16, *size))
        predicted = cost.predict(row, channels=16, size=size, batch=3, heads=heads, project=project)
        assert predicted.macs == counted.macs, (project, size)
        assert (predicted.parameters, predicted.weights) == (counted.parameters, counted.weights), project
        assert predicted == cost.predict(module, size=size, batch=3)


@pytest.mark.parametrize("row", OPERATORS)
def test_the_formula_is_what_executes_with_other_channels(row: str) -> None:
    narrow: dict[str, object] = {} if row == "siamese_local" else {"inner_channels": 8}
    letters = OPERATORS[row].projections("qkvo")
    for width, heads, output in itertools.product((4, 24), (1, 2, 4), ("", "o")):
        project = letters.replace("o", output)
        module = attention(row, heads=heads, project=project, value_channels=width, bias=False, **narrow)
        counted, predicted = cost.count(module, (2, 16, 5, 7)), cost.predict(module, size=(5, 7), batch=2)
        assert predicted.macs == counted.macs, (width, heads, project)
        assert (predicted.parameters, predicted.weights) == (counted.parameters, counted.weights)


@pytest.mark.parametrize(("row", "heads", "shift"), [("averaged", 2, 0), ("siamese", 1, 16 * 25)])
def test_a_norm_adds_its_shift_and_a_residual_nothing(row: str, heads: int, shift: int) -> None:
    """Where slots are few beside the channels, the shift is one slot more; else it is added and not multiplied."""
    plain, normed = attention(row, heads=heads), attention(row, heads=heads, coefficient_norm=True, residual=True)
    assert cost.count(plain, (1, 16, 5, 5)).macs + shift == cost.count(normed, (1, 16, 5, 5)).macs
    assert cost.predict(normed, size=(5, 5)).macs == cost.count(normed, (1, 16, 5, 5)).macs
    found = cost.predict(normed, size=(5, 5))
    assert found.parameters == cost.predict(plain, size=(5, 5)).parameters + 2 * 16
    assert found.weights == cost.predict(plain, size=(5, 5)).weights


@pytest.mark.parametrize("row", OPERATORS)
def test_coefficients_are_those_of_the_row(row: str) -> None:
    module = GridAttention(8, row, heads=2, project="v").eval()
    grid = torch.randn(3, 8, 4, 6)
    summary = module.summarize(grid)
    queries = project_queries(module.call_for(grid), module.operator.queries_from.gather(grid))
    found = module.operator.coefficients(queries, summary)
    assert found.numel() == cost.predict(module, size=(4, 6), batch=3).coefficients


@pytest.mark.parametrize(*pairwise(row=list(OPERATORS), heads=[1, 4], project=["", "v"]))
def test_activation_bytes_are_real(row: str, heads: int, project: str) -> None:
    module = GridAttention(16, row, heads=heads, project=project).eval()
    grid = torch.randn(2, 16, 20, 24, requires_grad=True)
    predicted = cost.predict(module, size=(20, 24), batch=2).activation_bytes
    with LiveBytes() as live:
        kept = module(grid)
    assert kept.shape == grid.shape
    # What is formed is really there, and the temporaries on top are at most twice as much again.
    assert 0.99 * predicted <= live.peak <= 3 * predicted


def test_only_dot_holds_the_square() -> None:
    for row in OPERATORS:
        small, large = (cost.predict(row, channels=8, size=(side,)).activation_bytes for side in (512, 1024))
        assert large > 3.9 * small if row == "dot" else large < 2.1 * small


def test_a_network_is_counted_in_the_convention() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)
            self.attention = GridAttention(8, "siamese", heads=4, bias=False)
            self.squeeze = SqueezeExcite(8)

        def forward(self, image: Tensor) -> Tensor:
            grid = self.attention(self.convolution(image))
            # Twice the same module, and once on a context, which is counted as it executes.
            return self.squeeze(self.attention(grid, context=grid[..., :2]) + self.attention(grid))

    net, positions = Net().eval(), 5 * 6
    printed = cost.predict(net, channels=3, size=(5, 6), batch=2, convention="paper").macs
    crossed = cost.count(net.attention, [(2, 8, 5, 6), (2, 8, 5, 2)]).macs
    outside = positions * 3 * 8 * 9 + 8 * 4 * 2 + 2 * positions * 8
    assert printed == 2 * (outside + 2 * (positions * 64 + 4 * positions * 8)) + crossed
    assert cost.predict(net, channels=3, size=(5, 6), batch=2) == cost.count(net, (2, 3, 5, 6))


def test_latents_are_counted_and_not_their_usual_number() -> None:
    for slots in (1, 16, 100):
        module = attention(flare(slots), heads=2, project="kvo")
        counted, predicted = cost.count(module, (3, 16, 5, 6)), cost.predict(module, size=(5, 6), batch=3)
        by_operator = cost.predict(flare(slots), channels=16, size=(5, 6), batch=3, heads=2, project="kvo")
        assert predicted.macs == counted.macs
        assert predicted.weights == counted.weights
        assert predicted == by_operator


# ---- predict: errors -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row", ["flare", "linear_relu", "linear_elu", "hedgehog", "inline", "mala"])
def test_operators_that_no_paper_covers_have_farfields_count_alone(row: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), GridAttention(8, row))
    for operator in (row, net):
        with pytest.raises(
            LookupError, match=f'^cost.predict: .*convention .*KAN, SAN, FA .*{row}; fix: convention="farfield"'
        ):
            cost.predict(operator, channels=3 if operator is net else 8, size=(5, 6), convention="paper")
    with pytest.raises(LookupError, match=f'^cost.predict: no operator of SAN "{row}"; it has averaged, '):
        cost.predict(row, channels=8, size=(5, 6), convention="SAN")


def test_operators_of_the_table_are_found_by_what_they_are() -> None:
    same = dataclasses.replace(OPERATORS["averaged"])
    assert cost.predict(same, channels=8, size=(5,)) == cost.predict("averaged", channels=8, size=(5,))


def test_an_operator_of_ones_own_has_no_formula() -> None:
    own = Operator(coefficients=queries, basis=keys, per=position, score="ones")
    video = dataclasses.replace(OPERATORS["softmax_pooled"], keys_from=pooled((1, 2, 2)))
    for operator in (own, video):
        with pytest.raises(
            LookupError,
            match=r"cost.predict: .*formula .*ops\.OPERATORS; fix: cost\.count\(",
        ):
            cost.predict(operator, channels=8, size=(4, 5, 6))
        with pytest.raises(LookupError, match="no formula"):
            cost.predict(attention(operator, 8), size=(4, 5, 6))
        assert cost.count(attention(operator, 8), (1, 8, 4, 5, 6)).macs > 0


@pytest.mark.parametrize(
    ("operator", "options", "kind", "text"),
    [
        ("siamse", {}, LookupError, 'cost.predict: no operator "siamse"; nearest: siamese'),
        ("dot", {"convention": "papre"}, LookupError, 'cost.predict: no convention "papre"; nearest: paper'),
        ("dot", {"convention": "KAN"}, LookupError, 'cost.predict: no operator of KAN "dot"; it has softmax, '),
        ("kronecker_kv", {"convention": "SAN"}, LookupError, 'cost.predict: no operator of SAN "kronecker_kv"; '),
        (
            "dot",
            {"heads": 3},
            ShapeError,
            "cost.predict: heads=3 does not divide the 16 channels of query; try heads=2",
        ),
        ("dot", {"heads": 0}, ValueError, "cost.predict: heads must be a whole number from 1, got 0"),
        ("dot", {"batch": 0}, ValueError, "cost.predict: batch must be a whole number from 1, got 0"),
        ("dot", {"size": (5, 0)}, ValueError, r"cost.predict: size\[1\] must be a whole number from 1, got 0"),
        ("dot", {"size": (5.0,)}, ValueError, r"cost.predict: size\[0\] must be a whole number from 1, got 5.0"),
        ("dot", {"size": ()}, ValueError, "cost.predict: size must have one number per spatial dim, got none"),
        ("dot", {"channels": None}, ValueError, "cost.predict: it needs the grid's channels; fix: channels="),
        ("dot", {"project": "qvq"}, ValueError, "cost.predict: project='qvq' must be letters of \"qkvo\""),
        ("siamese_local", {"project": "qkv"}, ValueError, 'siamese_local reads no keys; fix: project="qv"'),
        ("dot", {"inner_channels": 8}, ValueError, "inner_channels=8 needs queries and keys projected"),
    ],
)
def test_errors_of_predict(operator: str, options: dict[str, object], kind: type[Exception], text: str) -> None:
    arguments = {"channels": 16, "size": (5, 6)} | options
    with pytest.raises(kind, match=text):
        cost.predict(operator, **arguments)  # type: ignore[arg-type]


# ---- measure ---------------------------------------------------------------------------------------------------------
def test_measure_sees_the_bytes_that_are_alive_together() -> None:
    grid = torch.zeros(1000)

    def peak(function: object) -> int:
        return cost.measure(function, grid, repeats=1, warm_up=0).peak_bytes  # type: ignore[arg-type]

    assert peak(lambda x: x + 1) == 4000
    assert peak(lambda x: (x + 1) * 2) == 8000  # both are alive while the second is made
    assert peak(lambda x: ((x + 1) * 2) * 3) == 8000  # the first is dead by then
    assert peak(lambda x: (x + 1).sum()) == 4004
    assert peak(lambda x: [torch.empty(1000) for _ in range(5)]) == 20000
    assert peak(lambda x: [torch.empty(1000).sum() for _ in range(5)]) == 4000 + 5 * 4
    # A view, and what happens in place, is no memory of its own.
    assert peak(lambda x: x.view(10, 100).mT[3]) == 0
    assert peak(lambda x: x.add_(1)) == 0
    assert peak(lambda x: x.double().float()) == 12000


def test_measure_of_gradients() -> None:
    leaf = torch.zeros(1000, requires_grad=True)
    forward, both = (cost.measure(torch.exp, leaf, backward=flag, repeats=1).peak_bytes for flag in (False, True))
    assert forward == 4000
    # The response, kept for its own gradient; the sum; the gradients of the sum, spread and of the leaf.
    assert 8000 < both <= 16012
    assert leaf.grad is None
    layer = nn.Linear(4, 4)
    cost.measure(layer, torch.zeros(2, 4), backward=True, repeats=1)
    assert layer.weight.grad is None
    with pytest.raises(ValueError, match="backward=True, but no output has a gradient"):
        cost.measure(torch.exp, torch.zeros(3), backward=True)


def test_measure_takes_the_median_of_the_repeats_after_the_warm_up() -> None:
    waits = iter([0.05, 0.05, 0.001, 0.02, 0.2, 0.0])

    def waiting(x: Tensor) -> Tensor:
        time.sleep(next(waits))
        return x

    found = cost.measure(waiting, torch.zeros(1), repeats=3, warm_up=2)
    assert 0.02 <= found.seconds < 0.15
    assert 0.001 <= found.fastest < 0.02
    assert found.repeats == 3
    assert next(waits, None) is None  # two to warm up, three timed, one watched
    assert f"{torch.get_num_threads()} threads" in found.device


def test_measure_leaves_mode_and_gradients_alone() -> None:
    net = nn.Dropout(0.5).train()
    cost.measure(net, torch.zeros(3), repeats=1)
    assert net.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("options", [{"repeats": 0}, {"warm_up": -1}])
def test_measure_refuses_nothing_to_do(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"cost.measure: repeats must be at least 1"):
        cost.measure(torch.exp, torch.zeros(3), **options)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_measure_on_cuda() -> None:
    grid = torch.zeros(1 << 20, device="cuda")
    found = cost.measure(lambda x: (x + 1) * 2, grid, repeats=5)
    assert found.peak_bytes == 8 << 20
    assert 0 < found.fastest <= found.seconds < 1
    assert found.device == torch.cuda.get_device_name()


@pytest.mark.parametrize("heads", [1, 2])
def test_fused_attention_counts_its_two_products_forward_and_four_backward(heads: int) -> None:
    query, key, value = (torch.randn(2, heads, n, 8, requires_grad=True) for n in (5, 7, 7))
    with MacCounter() as counter:
        response = F.scaled_dot_product_attention(query, key, value)
    assert counter.macs == 2 * heads * 2 * 5 * 7 * 8
    with MacCounter() as counter:
        response.sum().backward()
    # Backward computes the attention map again, and four products.
    assert counter.macs == 2 * heads * 5 * 5 * 7 * 8


def test_a_size_of_one_number_and_a_shape_without_batch() -> None:
    with pytest.raises(TypeError, match=r"^cost\.predict: size .*, got 56; fix: size=\(56, 56\)"):
        cost.predict("siamese", channels=8, size=56)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^cost\.plan: size .*, got 56; fix: size=\(56, 56\)"):
        cost.plan(channels=8, size=56)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r'class GridAttention; fix: GridAttention\(64, "factorized_gaussian"\)'):
        cost.predict(GridAttention, channels=8, size=(5, 6))  # type: ignore[arg-type]

    class Strict(nn.Conv2d):
        def forward(self, images: Tensor) -> Tensor:
            if images.dim() != 4:
                raise ValueError("no batch of images")
            return super().forward(images)

    with pytest.raises(RuntimeError, match=r"no batch of images\n  fix: a shape with the batch, such as"):
        cost.count(Strict(3, 8, 3), (3, 10, 10))


def test_arguments_of_another_kind() -> None:
    conv = torch.nn.Conv2d(3, 8, 3)
    with pytest.raises(TypeError, match=r"cost.predict: size must be numbers, .* fix: size=\(56, 56\)"):
        cost.predict("softmax", channels=8, size="56,56")
    with pytest.raises(TypeError, match=r"cost.count: module .*torch\.nn\.Module, got tuple; fix"):
        cost.count((1, 3, 8, 8), conv)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cost.measure: inputs must be tensors, .* fix: torch.randn\(1, 3, 8, 8\)"):
        cost.measure(conv, (1, 3, 8, 8))


# ---- the tables of the documentation ---------------------------------------------------------------------------------
ROOT = Path(__file__).parents[1]


def counted(operator: str, size: tuple[int, int], heads: int | None = None) -> int:
    """The MACs of the recommended attention on a grid of 64 channels, by the formulas, which other tests count."""
    return cost.predict(attention_for(64, operator, heads=heads).attention, size=size).macs


@pytest.mark.parametrize("row", OPERATORS)
def test_the_table_to_choose_by_has_what_the_recommended_attention_counts(row: str) -> None:
    page = (ROOT / "docs/guide/choose.md").read_text(encoding="utf-8")
    table = page[page.index("| operator | recall") : page.index("*Recall* is")]
    (entries,) = (line.split("|")[3:6] for line in table.splitlines() if f"`{row}`" in line)
    counts = counted(row, (56, 56), 1), counted(row, (56, 56), 8), counted(row, (224, 224), 1)
    assert [entry.strip() for entry in entries] == [f"{round(macs / 1e6):,} m" for macs in counts]
    assert counts[1] == counted(row, (56, 56))


def test_readme_states_what_the_recommended_attention_counts() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    softmax, size = counted("softmax", (56, 56)), (56, 56)
    (recommended,) = (line for line in text.splitlines() if line.startswith("| larger images"))
    stated = [int(share) for share in re.findall(r"1/(\d+)", recommended)]
    assert stated == [round(softmax / counted("flare", size, heads)) for heads in (1, 8)]
    stated = re.findall(r"takes (\d+) million MACs .*softmax attention takes (\d+) billion", text)
    assert stated == [(f"{counted(DEFAULT, (224, 224)) // 10**6}", f"{counted('softmax', (224, 224)) // 10**9}")]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_counted_again(name: str) -> None:
    attention = attention_for(16, name)
    # A count runs a copy, whose objects lose what they hold.
    assert cost.count(attention, (1, 16, 8, 8)) == cost.count(attention, (1, 16, 8, 8))
