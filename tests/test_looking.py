"""Whatever looks at a network leaves it as it was, whatever the network keeps, and in several threads."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from farfield import WholeNetwork, cost, insert, insertion, maps, replace_attention
from farfield.nn import GridAttention, attention_for, leftovers
from farfield.streaming import find_seams, freeze_statistics, plan_whole, predict_whole, respond_whole
from helpers.networks_with_state import CHANNELS, INSIDE, OUTSIDE, SIZE, Base, build, contents, forget
from helpers.partly import in_turn

SHAPE = (1, CHANNELS, SIZE, SIZE)


slow = pytest.mark.slow


def refused(make: Callable[[int], nn.Module]) -> Callable[[nn.Module], Any]:
    """Insert what insert refuses after it has run it."""
    return lambda net: insert(net, next(path for path, _ in net.named_children()), make, example=example())


def example() -> Tensor:
    return torch.linspace(-1, 1, CHANNELS * SIZE * SIZE).view(SHAPE)


LOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "count": lambda net: cost.count(net, SHAPE).macs,
    "predict": lambda net: cost.predict(net, channels=CHANNELS, size=(SIZE, SIZE)).macs,
    "places": lambda net: insertion.places(net, example()),
    "insert": refused(lambda channels: nn.Conv2d(channels, channels + 1, 1)),
    "replace_attention": lambda net: replace_attention(net, "siamese"),
    "layers": lambda net: maps.layers(net, example()),
    "health": lambda net: maps.health(net, example()),
    "plan_whole": lambda net: plan_whole(net, SHAPE[1:], tile=8).tile,
    "predict_whole": lambda net: predict_whole(net, example()[0], tile=8, quiet=True),
}
# What functions say of networks that they refuse.
REFUSALS = (ValueError, TypeError, RuntimeError, LookupError, NotImplementedError)


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    forget()
    yield
    forget()


def look(net: nn.Module, name: str) -> Any:
    with suppress(*REFUSALS):
        return LOOKS[name](net)
    return None


def check_unchanged(before: list[tuple[str, Any, Any]], net: nn.Module) -> None:
    after = list(contents(net))
    assert [where for where, *_ in after] == [where for where, *_ in before]
    for (where, old, held), (_, new, holds) in zip(before, after, strict=True):
        assert old is new, where
        assert torch.equal(held, holds) if isinstance(held, Tensor) else held == holds, where


@pytest.mark.parametrize("kind", INSIDE)
def test_a_network_that_is_looked_at_is_as_before(kind: str) -> None:
    net = build(INSIDE[kind])
    before = list(contents(net))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in LOOKS:
            look(net, name)
            check_unchanged(before, net)
    outputs = []
    for each in (net, build(INSIDE[kind])):
        torch.manual_seed(1)
        outputs.append(each(example()))
    output, expected = outputs
    assert type(output) is Tensor
    assert torch.equal(output, expected)


@torch.compile(backend="eager")
def double(grid: Tensor) -> Tensor:
    return 2 * grid


class WithCompiledFunctions(nn.Module):
    """A network with compiled functions among its attributes, and one that its module names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.act, self.run = (
            torch.compile(nn.functional.gelu, backend="eager"),
            torch.compile(self.halve, backend="eager"),
        )

    def halve(self, grid: Tensor) -> Tensor:
        return self.layer(grid) / 2

    def forward(self, grid: Tensor) -> Tensor:
        return double(self.act(self.run(grid)))


def with_a_compiled_part() -> nn.Module:
    part = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.InstanceNorm2d(CHANNELS))
    compiled = torch.compile(part, backend="eager")
    return nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), compiled, nn.Conv2d(CHANNELS, 2, 1))


def with_a_compiled_call() -> nn.Module:
    net = with_a_compiled_part()[0]
    net.compile(backend="eager")
    return nn.Sequential(net, nn.InstanceNorm2d(CHANNELS))


@pytest.mark.parametrize("make", [WithCompiledFunctions, with_a_compiled_part, with_a_compiled_call])
def test_a_network_with_compiled_parts_runs_as_before(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    # Large enough for a region to be checked, so that a copy runs on numbers too.
    net, volume = make().eval(), torch.randn(1, CHANNELS, 40, 36)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        expected = net(volume)
    with torch.no_grad():
        # The second time, the compiler has what it made of the first.
        for _ in range(2):
            torch.testing.assert_close(predict_whole(net, volume[0], tile=16, quiet=True), expected[0])
        for name in LOOKS:
            look(net, name)
        torch.testing.assert_close(net(volume), expected)
        net(volume[..., :20])


class Writing(nn.Module):
    """A network that writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Conv2d(CHANNELS, 8, 3, padding=1), GridAttention(8, "siamese")
        self.last = nn.Sequential(nn.InstanceNorm2d(8), nn.Conv2d(8, 2, 1))

    def forward(self, grid: Tensor) -> Tensor:
        return self.last(self.attention(self.first(grid.sub_(0.4).mul_(3.0))))


GIVEN: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "insert": lambda net, given: insert(net, "first", attention_for, example=given),
    "places": lambda net, given: insertion.places(net, given),
    "layers": lambda net, given: maps.layers(net, given),
    "health": lambda net, given: maps.health(net, given),
    "freeze_statistics": lambda net, given: freeze_statistics(net, given),
    "find_seams": lambda net, given: find_seams(net, given[0], tile=8),
    "predict_whole": lambda net, given: predict_whole(net, given, tile=8, quiet=True),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_to_a_network_that_writes_to_it_is_as_before(name: str) -> None:
    given = torch.rand(1, CHANNELS, 40, 36)
    kept = given.clone()
    GIVEN[name](Writing().eval(), given)
    assert torch.equal(given, kept)


def fakes() -> list[FakeTensor]:
    return [each for each in gc.get_objects() if type(each) is FakeTensor and each.shape[-1:] == (SIZE,)]


@pytest.fixture
def collected() -> Iterator[None]:
    """What holds a tensor is looked for among all objects, those of modules included."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.long
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize(*in_turn(kind=list(OUTSIDE), name=["count", "predict_whole"]))
def test_a_cache_outside_of_the_network_is_named_and_cleared(kind: str, name: str) -> None:
    make, cache = OUTSIDE[kind]
    net = build(make)
    earlier = fakes()
    with pytest.warns(UserWarning, match=rf"{name}: {make.__name__} keeps .* in [^;]*{cache}.*\n  fix: keep them in"):
        LOOKS[name](net)
    output = net(example())
    assert type(output) is Tensor
    assert torch.equal(output, Base.forward(net, example()))
    gc.collect()
    assert not [each for each in fakes() if not any(each is other for other in earlier)]


def test_a_cache_of_numbers_is_left_alone() -> None:
    net = build(OUTSIDE["cached function"][0])
    expected = net(example())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cost.count(net, SHAPE)
    assert torch.equal(net(example()), expected)


@pytest.mark.parametrize("kind", ["first call", "patched", "buffers", "hooked"])
def test_two_threads_look_at_a_network_that_a_third_runs(kind: str) -> None:
    net = build(INSIDE[kind])
    names = ("count", "places", "predict_whole")
    expected, macs = net(example()), look(build(INSIDE[kind]), "count")
    found: list[Any] = []
    done = threading.Event()

    def run() -> None:
        found.append([look(net, name) for name in names])

    def run_network() -> None:
        while not done.is_set():
            found.append(torch.equal(net(example()), expected))

    threads = [threading.Thread(target=run) for _ in range(2)]
    third = threading.Thread(target=run_network)
    for thread in (*threads, third):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    third.join()
    looks = [each for each in found if isinstance(each, list)]
    assert len(looks) == 2
    assert False not in found
    for counted, places, predicted in looks:
        assert counted == macs
        assert [place.path for place in places] == [place.path for place in look(net, "places")]
        if predicted is not None:
            torch.testing.assert_close(predicted, expected[0])


def test_counts_by_module_in_two_threads() -> None:
    net = nn.Sequential(*(Base() for _ in range(8)))
    expected = cost.count(net, SHAPE)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(cost.count(net, SHAPE))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected, expected]


def test_an_attention_that_responds_in_tiles_is_as_before() -> None:
    layer = GridAttention(CHANNELS, "siamese", project="qkv").eval()
    before = list(contents(layer))
    respond_whole(layer, example()[0], tile=8, quiet=True)
    check_unchanged(before, layer)
    assert maps.layers(nn.Sequential(layer), example())["0"].attention is layer


def test_gradients_are_there_after_a_measurement() -> None:
    net = build(Base)
    net(example()).sum().backward()
    before = [(weight.grad, weight.grad.clone()) for weight in net.parameters()]
    cost.measure(net, example(), backward=True, repeats=1, warm_up=0)
    assert all(weight.grad is own for weight, (own, _) in zip(net.parameters(), before, strict=True))
    assert all(torch.equal(own, copy) for own, copy in before)


@pytest.mark.parametrize("name", ["count", "predict", "places", "layers"])
def test_a_scripted_part_is_refused_by_name(name: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"Sequential in it is scripted, .*; fix: the module that was"):
        LOOKS[name](build(INSIDE["scripted"]))


def test_a_lazy_network_is_refused_with_a_fix_that_works() -> None:
    net = build(INSIDE["lazy"])
    with pytest.raises(RuntimeError, match=r"lazy .*weights.*; fix: run it once"):
        cost.count(net, SHAPE)
    net(example())
    assert cost.count(net, SHAPE).macs == 2 * CHANNELS**2 * 9 * SIZE**2


@pytest.mark.parametrize(
    "name", ["levit_128s", pytest.param("efficientformer_l1", marks=slow), pytest.param("tiny_vit_5m_224", marks=slow)]
)
def test_networks_of_timm_that_make_constants_when_they_run(name: str) -> None:
    timm = pytest.importorskip("timm")
    net = timm.create_model(name).eval()
    image = torch.rand(1, 3, 224, 224)
    assert cost.count(net, (1, 3, 224, 224)).macs > 0
    with torch.no_grad():
        assert type(net(image)) is Tensor


@pytest.mark.parametrize("is_trained", [False, True])
def test_nothing_is_looked_for_where_nothing_is_left(is_trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for what holds a tensor takes the time of all objects that there are."""

    found: list[int] = []
    monkeypatch.setattr(leftovers, "find_chains", lambda left: found.append(len(left)) or [])
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Dropout(0.1)).train(is_trained)
    if is_trained:
        WholeNetwork(net, tile=8).plan((1, 1, 32, 32))
    else:
        plan_whole(net, (1, 32, 32), tile=8)
    assert found or is_trained
    assert not any(found)
