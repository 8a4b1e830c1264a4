"""The module around a network: what others do with it, what it refuses, and what is left behind an error."""

from __future__ import annotations

import copy
import gc
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import farfield
from farfield.streaming import Tiles
from farfield.streaming.labels import GraphError
from farfield.streaming.training import WholeNetwork
from farfield.streaming.training.backward import Backward
from helpers.explaining import explains
from helpers.several_processes import alone
from helpers.trained_nets import UNet, dice, differentiate, farthest

TOLERANCE = 1e-10


def made(norm: str = "batch", **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return UNet(2, norm, **options).double()


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape or (2, 2, 24, 32), dtype=torch.float64)


@pytest.fixture
def one_process() -> Iterator[None]:
    with alone():
        yield


def agrees(
    net: nn.Module, loss: Callable[[Callable[..., Any], Tensor], Tensor], volume: Tensor, tile: Any = 8, **options: Any
) -> None:
    want = differentiate(net, lambda own, grid: loss(own, grid), volume)
    got = differentiate(net, lambda own, grid: loss(WholeNetwork(own, tile, **options), grid), volume)
    distance, where = farthest(got, want)
    assert distance < TOLERANCE, where


# ---- what others do with it ------------------------------------------------------------------------------------------
def test_it_is_a_name_of_the_library() -> None:
    assert farfield.WholeNetwork is WholeNetwork


def test_several_steps_of_an_optimizer_are_those_of_the_network() -> None:
    net, volumes, target = made(), [drawn() for _ in range(6)], torch.randint(0, 3, (2, 24, 32))
    other = copy.deepcopy(net)
    for own, call in ((net, WholeNetwork(net, 8)), (other, other)):
        optimizer = torch.optim.AdamW(own.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for volume in volumes:
            optimizer.zero_grad()
            F.cross_entropy(call(volume), target).backward()
            nn.utils.clip_grad_norm_(own.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    # Adam divides by the root of squares, which multiplies rounding of gradients near 0.
    for (name, one), two in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6, msg=name)


def test_gradients_add_up_over_calls_before_one_backward_pass() -> None:
    first, second = drawn(), drawn(1, 2, 16, 24)
    agrees(made("instance"), lambda call, grid: call(grid).square().mean() + call(second).mean(), first)


def test_a_call_in_another_loss_and_on_its_own_result() -> None:
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.InstanceNorm2d(2, affine=True)).double()
    agrees(net, lambda call, grid: call(call(grid).tanh()).exp().mean() + grid.mean(), drawn())


class Exponentials(nn.Module):
    """A softmax and a logarithm of sums of exponentials over all positions, whose peaks differ from tile to tile."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, grid: Tensor) -> Tensor:
        inner = 4 * self.first(grid)
        pooled = (inner.softmax(2) * inner.log_softmax(3)).sum((2, 3), keepdim=True)
        return self.last(inner.tanh() + pooled + inner.logsumexp((2, 3), keepdim=True))


def test_exponentials_over_all_positions() -> None:
    torch.manual_seed(1)
    agrees(Exponentials().double(), lambda call, grid: call(grid).square().mean(), drawn())


def test_outputs_in_dicts_and_a_part_of_them_used() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

        def forward(self, grid: Tensor) -> dict[str, Any]:
            inner = self.first(grid)
            classes = inner.argmax(1)
            return {"out": self.last(inner), "more": (inner[:, :2], None, inner.mean()), "classes": classes, "scale": 2}

    net, volume = Several().double(), drawn()
    with torch.enable_grad():
        result, want = WholeNetwork(net, 8)(volume), net(volume)
    assert (result["scale"], result["more"][1]) == (2, None)
    assert torch.equal(result["classes"], want["classes"])
    assert not result["classes"].requires_grad
    agrees(net, lambda call, grid: call(grid)["out"].square().mean() + call(grid)["more"][2], volume)
    agrees(net, lambda call, grid: sum(each.square().sum() for each in call(grid)["more"][::2]), volume)


def test_several_inputs_and_their_gradients() -> None:
    class Two(nn.Conv2d):
        def forward(self, grid: Tensor, other: Tensor) -> Tensor:
            return super().forward(grid) * other.mean((2, 3), keepdim=True)

    net, other = Two(2, 2, 3, padding=1).double(), drawn()
    agrees(net, lambda call, grid: call(grid, other * grid).square().mean(), drawn())
    whole, volume = WholeNetwork(net, 8, lambda output, target: F.mse_loss(output, target)), drawn()
    torch.testing.assert_close(whole((volume, other), other), F.mse_loss(net(volume, other), other))


def test_checkpoints_inside_and_frozen_parameters() -> None:
    class Checked(nn.Sequential):
        def forward(self, grid: Tensor) -> Tensor:
            for layer in self:
                grid = checkpoint(layer, grid, use_reentrant=False)
            return grid

    net = Checked(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1)).double()
    for each in net[0].parameters():
        each.requires_grad_(False)
    agrees(net, lambda call, grid: call(grid).square().mean(), drawn())


class ComplexWeights(nn.Module):
    """The squared length of channels that are multiplied with complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 2, 1, 1, dtype=torch.complex128))

    def forward(self, grid: Tensor) -> Tensor:
        product = grid * self.weight
        return (product * (product + grid).conj()).imag


def test_complex_parameters_keep_their_imaginary_part() -> None:
    network, volume = ComplexWeights(), torch.rand(1, 2, 20, 18, dtype=torch.float64)
    wanted = torch.autograd.grad(network(volume).square().sum(), network.weight)
    found = torch.autograd.grad(WholeNetwork(network, tile=8)(volume).square().sum(), network.weight)
    assert wanted[0].imag.abs().max() > 1
    torch.testing.assert_close(found, wanted)


def test_tiles_leave_no_tensor_to_a_garbage_collection() -> None:
    whole, volume = WholeNetwork(UNet(2, "instance"), tile=16), torch.rand(1, 2, 48, 48)
    loss = whole(volume).square().sum()
    gc.collect()
    gc.disable()
    try:
        loss.backward()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [each for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_ties_of_extremes_share_a_gradient() -> None:
    class Peaks(nn.Conv2d):
        def forward(self, grid: Tensor) -> Tensor:
            # Each number stands four times side by side, in two tiles.
            grid = F.interpolate(super().forward(grid), scale_factor=2.0)
            grid = torch.cat([grid, grid], 3)
            return grid.amax((2, 3)) - 2 * grid.amin((2, 3)) + grid.max() + torch.linalg.vector_norm(grid, torch.inf)

    agrees(Peaks(2, 3, 3, padding=1).double(), lambda call, grid: call(grid).square().sum(), drawn())


def test_buffers_that_a_network_writes_are_those_of_one_call() -> None:
    net = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(2, 4, 3, padding=1)), nn.BatchNorm2d(4, momentum=None)
    )
    agrees(net.double().train(), lambda call, grid: call(grid).square().mean(), drawn())


def test_the_state_is_that_of_the_network() -> None:
    net, whole = made(), WholeNetwork(made(), 8)
    assert list(whole.state_dict()) == list(net.state_dict())
    around, other = nn.ModuleDict({"net": WholeNetwork(made(), 8)}), nn.ModuleDict({"net": made()})
    assert list(around.state_dict()) == list(other.state_dict())
    state = {name: torch.randn_like(each.double()).to(each.dtype) for name, each in other.state_dict().items()}
    around.load_state_dict(state)
    other.load_state_dict(around.state_dict())
    for name, each in other.state_dict().items():
        assert torch.equal(each, state[name])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        whole.load_state_dict(net.state_dict() | {"extra": torch.ones(1)})


def test_it_is_copied_and_saved_with_its_loss() -> None:
    volume, target = drawn(), torch.randint(0, 3, (2, 24, 32))
    whole = WholeNetwork(made(), 8, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double()))
    want = whole(volume, target)
    file = io.BytesIO()
    torch.save(whole, file)
    file.seek(0)
    for other in (copy.deepcopy(whole), torch.load(file, weights_only=False)):
        assert torch.equal(other(volume, target), want)
    assert not any("loss" in name for name in whole.state_dict())
    whole.to(torch.float32)
    assert whole(volume.float(), target).dtype == torch.float32


class Scaled(nn.Conv2d):
    """A convolution times a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__(2, 3, 3, padding=1, dtype=torch.float64)
        self.scale = torch.full((3, 1, 1), 1.5, dtype=torch.float64, requires_grad=True)

    def forward(self, grid: Tensor) -> Tensor:
        return super().forward(grid) * self.scale


def test_tensors_that_are_no_parameters_have_gradients() -> None:
    net, volume, target = Scaled(), drawn(), drawn(2, 3, 24, 32)
    outer = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * outer

    leaf = net.scale
    for scale in (leaf, leaf.exp()):
        net.scale = scale
        got = torch.autograd.grad(WholeNetwork(net, 8, loss)(volume, target), (leaf, outer), retain_graph=True)
        want = torch.autograd.grad(loss(net(volume), target), (leaf, outer))
        torch.testing.assert_close(got, want)


class Centred(nn.Module):
    """A user's layer, whose tensor is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((2, 1, 1), 1.5, dtype=torch.float64, requires_grad=True)

    def forward(self, grid: Tensor) -> Tensor:
        return self.respond(grid, self.summarize(grid))

    def summarize(self, tile: Tensor) -> Tensor:
        return torch.stack([tile.flatten(2).sum(2), torch.full(tile.shape[:2], tile[0, 0].numel(), dtype=tile.dtype)])

    def respond(self, tile: Tensor, sums: Tensor) -> Tensor:
        return (tile - (sums[0] / sums[1])[:, :, None, None]) * self.scale


def test_tensors_of_a_users_layer_have_gradients() -> None:
    net, volume = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1).double(), Centred()), drawn()
    got, want = (
        torch.autograd.grad(call(volume).square().mean(), net[1].scale) for call in (WholeNetwork(net, 8), net)
    )
    torch.testing.assert_close(got, want)


def test_a_loss_with_parameters_has_their_gradients() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 1, 1, dtype=torch.float64))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return ((output * self.scale - target) ** 2).mean()

    loss, net, volume, target = Learned(), made(), drawn(), drawn(2, 3, 24, 32)
    WholeNetwork(net, 8, loss)(volume, target).backward()
    got, loss.scale.grad = loss.scale.grad, None
    loss(made()(volume), target).backward()
    torch.testing.assert_close(got, loss.scale.grad)


def test_in_eval_and_without_gradients_it_is_a_prediction() -> None:
    net, volume = made().eval(), drawn()
    whole = WholeNetwork(net, 8).eval()
    with torch.no_grad():
        torch.testing.assert_close(whole(volume), net(volume))
        assert not whole(volume).requires_grad
    agrees(net, lambda call, grid: call(grid).square().mean(), volume)


def test_without_gradients_norms_in_training_still_take_the_whole() -> None:
    net, volume = made(), drawn()
    other = copy.deepcopy(net)
    with torch.no_grad():
        torch.testing.assert_close(WholeNetwork(net, 8)(volume), other(volume))
    for (name, one), two in zip(net.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two, msg=name)


def test_autocast_is_that_of_the_call() -> None:
    net, volume = made("instance").float(), drawn().float()

    def loss(call: Callable[..., Any], grid: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(grid).float().square().mean()

    want = differentiate(net, loss, volume)
    exact = differentiate(net, lambda call, grid: call(grid).square().mean(), volume)
    got = differentiate(net, lambda own, grid: loss(WholeNetwork(own, 8), grid), volume)
    assert farthest(got, exact)[0] < 2 * farthest(want, exact)[0]


@pytest.mark.parametrize("disk", [None, 10**9], ids=["memory", "disk"])
def test_volumes_and_targets_in_files(disk: int | None, tmp_path: Path) -> None:
    net, volume, target = made("instance"), drawn(1, 2, 24, 32), torch.randint(0, 3, (1, 24, 32))
    np.save(tmp_path / "volume.npy", volume[0].numpy())
    np.save(tmp_path / "target.npy", target[0].numpy().astype(np.uint8))
    files = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("volume", "target")]
    whole = WholeNetwork(net, Tiles(8, disk=disk), dice)
    whole(*files).backward()
    got = [each.grad for each in net.parameters()]
    net.zero_grad()
    dice(net(volume), target).backward()
    for one, each in zip(got, net.parameters(), strict=True):
        torch.testing.assert_close(one, each.grad, rtol=1e-9, atol=1e-12)


# ---- what is refused, and errors -------------------------------------------------------------------------------------
def test_gradients_of_gradients_are_refused() -> None:
    whole, volume = WholeNetwork(made(), 8), drawn().requires_grad_()
    with explains(RuntimeError, "WholeNetwork", "create_graph=True", "create_graph=False"):
        torch.autograd.grad(whole(volume).sum(), volume, create_graph=True)


def test_a_second_backward_pass_is_refused() -> None:
    loss = WholeNetwork(made(), 8)(drawn()).sum()
    loss.backward(retain_graph=True)
    with explains(RuntimeError, "WholeNetwork", "gone after its backward pass"):
        loss.backward()


def test_a_parameter_that_is_written_before_the_backward_pass_is_noticed() -> None:
    net = made()
    loss = WholeNetwork(net, 8)(drawn()).sum()
    with torch.no_grad():
        net.head.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_masked_positions_of_a_volume_in_a_file_are_refused() -> None:
    volume = np.ma.masked_less(drawn(1, 2, 24, 32).numpy(), -2)
    with explains(ValueError, "WholeNetwork", "masked", "numpy.ma.filled"):
        WholeNetwork(made("instance"), 8)(volume)


def test_classes_of_a_file_are_whole_numbers_of_any_size() -> None:
    volume, ignored = drawn(1, 2, 24, 32), 2**24 + 1  # which float32 rounds
    target = np.where(np.arange(32) < 8, ignored, 1) + np.zeros((1, 24, 1), np.int64)
    net = made("instance")
    want = F.cross_entropy(net(volume), torch.from_numpy(target), ignore_index=ignored)
    got = WholeNetwork(net, 8, nn.CrossEntropyLoss(ignore_index=ignored))(volume, target)
    torch.testing.assert_close(got, want)


def test_a_loss_that_chooses_by_numbers_works_outside_alone() -> None:
    def hardest(output: Tensor, target: Tensor) -> Tensor:
        losses = (output - target).square().flatten()
        return losses[losses > losses.detach().mean()].mean()

    net, target = made("instance"), drawn(2, 3, 24, 32)
    with explains(GraphError, "WholeNetwork", "torch.where"):
        WholeNetwork(net, 8, hardest)(drawn(), target)
    agrees(net, lambda call, grid: hardest(call(grid), target), drawn())


def test_parts_that_cannot_be_taken_apart_are_refused() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1), torch.compile(nn.Conv2d(1, 1, 1)))
    other = nn.Conv2d(1, 1, 1)
    other.compile()
    for compiled in (net, nn.Sequential(nn.Conv2d(1, 1, 1), other)):
        with explains(TypeError, "WholeNetwork: 1 is compiled"):
            WholeNetwork(compiled)
    with explains(TypeError, "WholeNetwork"):
        WholeNetwork(lambda grid: grid)  # type: ignore[arg-type]
    with explains(ValueError, "WholeNetwork", "statistics"):
        WholeNetwork(net[0], Tiles(8, statistics="tile"))
    with explains(ValueError, "WholeNetwork", "(2, 24, 32)"):
        WholeNetwork(nn.Conv2d(2, 1, 1), 8)(drawn()[0].float())
    with explains(ValueError, "WholeNetwork", "does not take", "2, 24, 32", fix=False):
        WholeNetwork(nn.Conv2d(3, 1, 1), 8)(drawn().float())


def test_networks_of_several_processes_are_refused(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for spread in (fully_shard(nn.Conv2d(2, 1, 1), mesh=mesh), DistributedDataParallel(nn.Conv2d(2, 1, 1))):
        with explains(TypeError, "WholeNetwork", "spread over processes"):
            WholeNetwork(nn.Sequential(spread), 8)
    whole = WholeNetwork(nn.Sequential(nn.Conv2d(2, 2, 1), nn.SyncBatchNorm(2)), 8)
    fully_shard(whole.network[0], mesh=mesh)
    with explains(TypeError, "WholeNetwork: 0 is spread over processes"):
        whole(drawn().float())
    whole = WholeNetwork(nn.Sequential(nn.Conv2d(2, 2, 1), nn.SyncBatchNorm(2)), 8)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with explains(ValueError, "WholeNetwork: 1 has statistics of several processes"):
        whole(drawn().float())
    whole.eval()(drawn().float()).sum().backward()


def test_sums_without_a_gradient_in_tiles_are_refused() -> None:
    class Product(nn.Conv2d):
        def forward(self, grid: Tensor) -> Tensor:
            return super().forward(grid).prod(3).prod(2)

    with explains(GraphError, "WholeNetwork", "aten.prod", "no gradient"):
        WholeNetwork(Product(2, 1, 1).double(), 8)(drawn())


def test_an_error_in_the_backward_pass_leaves_no_file_and_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    net, files = made(), len(os.listdir("/proc/self/fd"))
    before = net.state_dict()
    volume = drawn().requires_grad_()
    loss = WholeNetwork(net, Tiles(8, disk=10**9))(volume).sum()
    run, calls = Backward._run_tile, []

    def fail(self: Backward, *args: Any) -> None:
        calls.append(args)
        if len(calls) > 30:
            raise KeyboardInterrupt
        run(self, *args)

    monkeypatch.setattr(Backward, "_run_tile", fail)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    monkeypatch.undo()
    assert volume.grad is None
    assert all(each.grad is None for each in net.parameters())
    assert before.keys() == net.state_dict().keys()
    assert len(os.listdir("/proc/self/fd")) == files
    # And the next step is as if there had been none.
    agrees(net, lambda call, grid: call(grid).square().mean(), drawn())


# ---- where gradients stop --------------------------------------------------------------------------------------------
class Stopping(nn.Module):
    """A convolution, and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.function = function

    def forward(self, grid: Tensor) -> Tensor:
        return self.last(self.function(self.first(grid)))


@torch.no_grad()
def scaled_without(grid: Tensor) -> Tensor:
    return grid.mean((2, 3), keepdim=True).exp()


def write_and_look(grid: Tensor) -> Tensor:
    """Write to a view, and look at the whole where no gradient is wanted, before it is used."""
    grid = grid * 2
    grid[:, 0].mul_(3)
    with torch.no_grad():
        scale = grid.amax()
    return grid / scale


def fill_without(grid: Tensor) -> Tensor:
    """Write to a new tensor and its views, where no gradient is wanted."""
    with torch.no_grad():
        mask = torch.zeros(grid.shape, dtype=grid.dtype)
        mask[:, 0] = 1
        mask[:, 1].fill_(2)
        mask[:, 2].copy_(grid[:, 1])
    mask.data[:, 3] = 3
    return grid * mask


def write_to_a_copy(grid: Tensor) -> Tensor:
    copied = grid.clone().detach()
    copied[:, 0] = 3
    return grid * copied.mul_(2)


STOPS: dict[str, Callable[[Tensor], Tensor]] = {
    "fill a new one": fill_without,
    "write to a copy": write_to_a_copy,
    "detach": lambda grid: grid * grid.mean((2, 3), keepdim=True).detach(),
    "straight through": lambda grid: grid + (grid.round() - grid).detach(),
    "no_grad": lambda grid: grid * scaled_without(grid),
    "data": lambda grid: grid * grid.data.relu(),
    "write and look": write_and_look,
    "reentrant": lambda grid: checkpoint(torch.tanh, grid, use_reentrant=True),
}


@pytest.mark.parametrize("name", STOPS)
def test_gradients_stop_where_the_network_stops_them(name: str) -> None:
    agrees(Stopping(STOPS[name]).double(), lambda call, grid: call(grid).square().mean(), drawn())


def write_without(grid: Tensor) -> Tensor:
    with torch.no_grad():
        grid.mul_(2)
    return grid


def write_from_without(grid: Tensor) -> Tensor:
    with torch.no_grad():
        total = torch.zeros_like(grid)
        total += grid
    return grid * total


def write_over_without(grid: Tensor) -> Tensor:
    grid = grid * 2
    with torch.no_grad():
        torch.zeros(grid.shape, dtype=grid.dtype, out=grid)
    return grid


def write_to_a_view_without(grid: Tensor) -> Tensor:
    grid = grid * 2
    with torch.no_grad():
        view = grid[:, 0]
        view.mul_(3)
    return grid


def write_to_data(grid: Tensor) -> Tensor:
    grid.data.mul_(3)
    return grid


def write_to_detached(grid: Tensor) -> Tensor:
    grid = grid * 2
    grid.detach()[:, 0] = 3
    return grid


def write_beside_detached(grid: Tensor) -> Tensor:
    grid = grid * 2
    before = grid.detach()
    grid.mul_(2)
    return grid * before


@pytest.mark.parametrize(
    ("function", "fix"),
    [
        (write_without, "(other - value).detach()"),
        (write_from_without, "(other - value).detach()"),
        (write_over_without, "(other - value).detach()"),
        (write_to_a_view_without, "detach().clone()"),
        (write_to_data, "detach().clone()"),
        (write_to_detached, "detach().clone()"),
        (write_beside_detached, "detach().clone()"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
@pytest.mark.parametrize("is_last", [False, True], ids=["within", "last"])
def test_writes_that_have_another_gradient_in_torch_are_refused(
    function: Callable[[Tensor], Tensor], fix: str, is_last: bool
) -> None:
    net = Stopping(function)
    if is_last:
        net.last = nn.Identity()
    with explains(GraphError, "WholeNetwork", fix):
        WholeNetwork(net.double(), 8)(drawn())


def test_a_function_with_a_backward_pass_of_its_own_is_refused() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, grid: Tensor) -> Tensor:
            return grid

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad

    for function in (Double.apply, lambda grid: Double.apply(grid)):
        with explains(GraphError, "WholeNetwork", "detach"):
            WholeNetwork(Stopping(function).double(), 8)(drawn())
    assert Double.apply(drawn(3)).shape == (3,)
