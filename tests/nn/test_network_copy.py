"""Copies of networks have the structure of the network, and the MACs that operations of torch execute."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farfield import cost
from farfield.nn.network_copy import CannotCopyError, clone, copied, make_empty, share_parameters


class Mode(Enum):
    """A value that is compared by identity."""

    FAST = 1


class Pair(NamedTuple):
    """A tuple of a class."""

    first: Any
    second: Any


class Slotted:
    """An object without a dict."""

    __slots__ = ("__secret", "empty")

    def __init__(self, secret: Any) -> None:
        self.__secret = secret

    @property
    def secret(self) -> Any:
        return self.__secret


class Closing:
    """An object that frees something at its end."""

    closed = 0

    def __del__(self) -> None:
        Closing.closed += 1


def holding(value: Any) -> nn.Module:
    """Return a network that holds something."""
    net = nn.Sequential(nn.Linear(2, 2))
    net.held = value
    return net


def held(value: Any) -> Any:
    """Return what a copy of a network holds in the place of a value."""
    with copied(holding(value), share_parameters) as own:
        return own.held


@pytest.mark.parametrize(
    "value",
    [
        Mode.FAST,
        np.zeros(3),
        threading.Lock(),
        sys,
        Tensor,
        torch.float32,
        F.relu,
        len,
        Closing(),
        (1, "two", Mode.FAST),
        iter("ab"),
        functools.lru_cache,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_structure_of_its_own_is_shared(value: Any) -> None:
    assert held(value) is value


@pytest.mark.parametrize("kind", [list, set, deque, OrderedDict, defaultdict, dict])
def test_containers_and_what_is_in_them_are_copied(kind: type) -> None:
    class Own(kind):  # type: ignore[misc,valid-type]
        def __init__(self, needed: Any) -> None:
            super().__init__()

    layer = nn.Linear(2, 2)
    for value in (kind(), Own(3)):
        if isinstance(value, dict):
            value["layer"], value[layer] = layer, 1
        else:
            value.add(layer) if kind is set else value.append(layer)
        own = held(value)
        assert type(own) is type(value)
        assert own is not value
        layers = [
            each for each in [*own, *(own.values() if isinstance(own, dict) else ())] if isinstance(each, nn.Module)
        ]
        assert len(layers) == (2 if isinstance(value, dict) else 1)
        assert all(each is layers[0] and each is not layer and each.weight is layer.weight for each in layers)


def test_limits_and_factories_of_containers_stay() -> None:
    assert held(deque([1, 2], maxlen=2)).maxlen == 2
    assert held(defaultdict(list, a=[1]))["b"] == []


def test_objects_methods_and_functions_refer_to_the_copy() -> None:
    net = holding(None)

    def forward(grid: Tensor, factor: float = 2.0, *, of: Any = net) -> Tensor:
        return factor * of[0](grid) + net[0].bias

    def recursive(depth: int) -> Any:
        return recursive(depth - 1) if depth else net

    net.held = Pair(types.SimpleNamespace(net=net), Slotted(net))
    net.parts = [functools.partial(forward, factor=3.0), net[0].forward, weakref.ref(net), {"net": net}.get, recursive]
    net.forward = forward
    inputs = torch.randn(3, 2)
    with copied(net, clone) as own:
        assert own is not net
        assert own.held.first.net is own
        assert type(own.held) is Pair
        assert own.held.second.secret is own
        assert not hasattr(own.held.second, "empty")
        partial, method, reference, get, again = own.parts
        assert method.__self__ is own[0]
        assert reference() is own
        assert get("net") is own
        assert again(2) is own
        assert forward.__closure__[0].cell_contents is net
        torch.testing.assert_close(own(inputs), net(inputs))
        with torch.no_grad():
            own[0].weight.zero_()
            own[0].bias.fill_(1)
        assert torch.equal(own(inputs), torch.full((3, 2), 3.0))
        assert torch.equal(partial(inputs), torch.full((3, 2), 4.0))


def test_tensors_are_shared_or_cloned_once() -> None:
    net = nn.BatchNorm1d(3)
    net.again, net.history = [net.weight, net.running_mean], net.weight * 2
    net.weight.note = "kept"
    with copied(net, share_parameters) as own:
        assert own.weight is own.again[0] is net.weight
        assert own.running_mean is own.again[1]
        assert own.running_mean is not net.running_mean
        assert own.history.is_leaf
        own(torch.randn(4, 3))
    assert not net.num_batches_tracked
    with copied(net, clone) as own:
        assert own.weight is own.again[0]
        assert own.weight is not net.weight
        assert type(own.weight) is nn.Parameter
        assert own.weight.note == "kept"
    with copied(net, lambda tensor: tensor) as own:
        assert own.running_mean is net.running_mean


@pytest.mark.parametrize("learned", [False, True])
def test_an_empty_parameter_is_learned_where_its_own_is(learned: bool) -> None:
    # Integers can have no gradient, and are parameters nonetheless.
    for dtype in (torch.float32, torch.int8)[: 2 - learned]:
        empty = make_empty(nn.Parameter(torch.zeros(3, dtype=dtype), learned))
        assert type(empty) is nn.Parameter
        assert empty.requires_grad == learned


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Run without the collection of cycles."""
    gc.disable()
    yield
    gc.enable()


def test_a_discarded_copy_keeps_nothing_alive_by_a_cycle(uncollected: None) -> None:
    cycle = types.SimpleNamespace(grid=torch.zeros(3))
    cycle.own = cycle
    with copied(holding(cycle), clone, discard=True) as own:
        grid = weakref.ref(own.held.grid)
    assert grid() is None


def test_the_error_of_a_copy_keeps_none_of_its_tensors_alive(uncollected: None) -> None:
    made: list[weakref.ref[Tensor]] = []

    def make_one(tensor: Tensor) -> Tensor:
        if made:
            raise CannotCopyError
        own = clone(tensor)
        made.append(weakref.ref(own))
        return own

    with pytest.raises(CannotCopyError) as error, copied(nn.Linear(2, 2), make_one, discard=True):
        pass
    assert error.tb is not None
    assert made[0]() is None


def test_hooks_report_to_the_user_only_where_they_may() -> None:
    net, seen, layers = nn.Linear(2, 2), [], []
    layers.append(net)
    net.register_forward_hook(lambda module, *_: seen.append(layers[0] is module))
    for reports in (False, True):
        with copied(net, share_parameters, reports=reports) as own:
            own(torch.zeros(2))
        assert seen == [True] * reports


# ---- MACs that torch's counter misses --------------------------------------------------------------------------------
def gates(kind: str) -> int:
    """Return how many matrices a recurrent layer has for each input."""
    return {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(("layers", "both", "first"), [(1, False, True), (2, True, False), (2, False, True)])
def test_recurrent_layers_count_their_matrices_at_each_step(kind: str, layers: int, both: bool, first: bool) -> None:
    net = getattr(nn, kind)(5, 7, layers, bidirectional=both, batch_first=first)
    macs = (
        3 * 11 * gates(kind) * 7 * (1 + both) * sum((5 if not layer else 7 * (1 + both)) + 7 for layer in range(layers))
    )
    assert cost.count(net, (3, 11, 5)).macs == cost.count(net.eval(), (3, 11, 5)).macs == macs


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_cells_count_their_matrices(kind: str) -> None:
    assert cost.count(getattr(nn, f"{kind}Cell")(5, 7), (3, 5)).macs == 3 * gates(kind) * 7 * (5 + 7)


def test_a_projected_lstm_counts_its_projection() -> None:
    macs = 3 * 11 * (4 * 7 * (5 + 2) + 7 * 2)
    assert cost.count(nn.LSTM(5, 7, proj_size=2, batch_first=True), (3, 11, 5)).macs == macs


@pytest.mark.parametrize("train", [False, True])
def test_the_fused_paths_of_transformers_count_as_the_others(train: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 20, batch_first=True).train(train)
    attention = 3 * (4 * 11 * 8 * 8 + 2 * 11 * 11 * 8)
    assert cost.count(layer, (3, 11, 8)).macs == attention + 2 * 3 * 11 * 8 * 20

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.attention(tokens, tokens, tokens)[0]

    assert cost.count(Self().train(train), (3, 11, 8)).macs == attention


class Calling(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


@pytest.mark.parametrize(
    ("function", "shapes", "macs"),
    [
        (torch.mv, ((4, 5), (5,)), 20),
        (torch.dot, ((5,), (5,)), 5),
        (torch.matmul, ((3, 4, 5), (5,)), 60),
        (torch.addmv, ((4,), (4, 5), (5,)), 20),
        (torch.addbmm, ((4, 6), (3, 4, 5), (3, 5, 6)), 360),
        (torch.cdist, ((2, 4, 5), (2, 6, 5)), 240),
        (lambda one, other: torch.cdist(one, other, p=1), ((2, 4, 5), (2, 6, 5)), 240),
        (lambda one, other: torch._int_mm(one.char(), other.char()), ((32, 8), (8, 24)), 32 * 8 * 24),
        (lambda one, other: torch.einsum("bij,bjk->bik", one, other), ((2, 4, 5), (2, 5, 3)), 120),
        (nn.Bilinear(4, 5, 6), ((2, 4), (2, 5)), 2 * 4 * 5 * 6),
    ],
)
def test_operations_that_torch_does_not_count(function: Any, shapes: tuple[tuple[int, ...], ...], macs: int) -> None:
    assert cost.count(Calling(function), shapes).macs == macs


def test_a_deformable_convolution_counts_as_a_convolution() -> None:
    torchvision = pytest.importorskip("torchvision")
    weight = torch.randn(6, 2, 3, 3)
    deformable = Calling(lambda grid, offset: torchvision.ops.deform_conv2d(grid, offset, weight, padding=1))
    assert cost.count(deformable, ((1, 4, 8, 9), (1, 18, 8, 9))).macs == 8 * 9 * 6 * 2 * 9


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.linalg.inv, r"aten\.linalg_inv_ex"),
        (torch.fft.rfft2, r"aten\._fft_r2c"),
        (torch.linalg.svd, "_linalg_svd"),
    ],
)
def test_what_no_formula_counts_is_named(function: Any, name: str) -> None:
    with pytest.warns(
        UserWarning, match=rf"cost\.count: \S*{name} in Calling add 0 MACs, because .*; fix: torch\.utils"
    ):
        cost.count(Calling(function), (3, 4, 4))
