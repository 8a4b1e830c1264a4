"""`places` lists exactly the places that `insert` accepts, in the order of the forward pass, and changes nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.models import resnet18

from farfield import insert, insertion, remove
from farfield.insertion._places import CHILD
from farfield.nn.bare import is_bare
from helpers.listing import accepts, made, paths
from helpers.small_hosts import Net, Pair, Pyramid, Tokens, identity, image
from helpers.small_networks import Block


def vit(**options: Any) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=12, depth=1, num_heads=2, num_classes=3, **options
    )


def swin() -> nn.Module:
    return timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=2, embed_dim=12, depths=(1, 1), num_heads=(2, 2)
    )


class Sequence(nn.Module):
    """A recurrent layer with the batch as its second dimension, a layer called twice, and one with integers."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.twice, self.conv = nn.GRU(4, 6), nn.ReLU(), nn.Conv1d(3, 4, 3, padding=1)
        self.indices = Indices()

    def forward(self, grid: Tensor) -> dict[str, Tensor]:
        grid = self.twice(self.twice(self.conv(grid)))
        states = self.last(grid.movedim(2, 0))[0]
        return {"grid": grid, "states": states, "indices": self.indices(grid), "mean": grid.mean(2)}


class Indices(nn.Module):
    def forward(self, grid: Tensor) -> Tensor:
        return grid.argsort(dim=-1)


SMALL: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "convolutions": (Net, image),
    "dict": (lambda: Pyramid(dict), image),
    "named tuple": (lambda: Pyramid(Pair), image),
    "tokens": (lambda: Tokens(fixed=16), torch.rand(2, 3, 16, 16)),
    "channels last": (lambda: Tokens(flat=False), image),
    "sequence": (Sequence, torch.rand(2, 3, 9)),
}


@pytest.mark.parametrize("layout", [None, "channels_first", "channels_last"])
@pytest.mark.parametrize("name", SMALL)
def test_exactly_the_places_that_insert_accepts(name: str, layout: Any) -> None:
    build, example = SMALL[name]
    model = build().eval()
    listed = insertion.places(model, example, layout=layout)
    first = [place.path for place in listed if layout or place.layout == "channels_first"]
    assert set(first) == {path for path in paths(model, example) if accepts(model, path, example, layout)}
    assert len(set(first)) == len(first)
    assert all(accepts(model, place.path, example, place.layout) for place in listed)


@pytest.mark.parametrize(
    ("build", "size", "kinds"),
    [
        (lambda: resnet18(weights=None), 32, {"BasicBlock": 8, "Sequential": 7, "MaxPool2d": 1}),
        (vit, 16, {"Block": 1, "PatchEmbed": 1, "Attention": 1}),
        (swin, 32, {"SwinTransformerBlock": 2, "PatchMerging": 1, "WindowAttention": 0}),
    ],
    ids=["resnet18", "vit", "swin"],
)
def test_every_place_of_a_network_is_accepted(build: Callable[[], nn.Module], size: int, kinds: dict[str, int]) -> None:
    model, example = build().eval(), torch.rand(1, 3, size, size)
    listed = insertion.places(model, example)
    for kind, count in kinds.items():
        assert sum(place.kind == kind for place in listed) == count
    for layout in ("channels_first", "channels_last"):
        chosen = [place for place in listed if place.layout == layout]
        if chosen:
            added = insert(model, [place.path for place in chosen], made, example=example, layout=layout)
            assert {path: module.num_parameters for path, module in added.items()} == {
                place.path: place.channels for place in chosen
            }
            remove(model)


def test_an_entry_in_full() -> None:
    place = insertion.places(Tokens(flat=False), image)[-1]
    assert place == ("blocks", "Sequential", 10, (3, 4), "channels_last", (2, 3, 4, 10))
    assert place == insertion.InsertionPlace(*place)
    place = insertion.places(vit(), torch.rand(2, 3, 16, 16))[-1]
    assert place == ("norm", "LayerNorm", 12, (17,), "channels_last", (2, 17, 12))


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Conv2d(4, 5, 1), nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())

    def forward(self, grid: Tensor) -> Tensor:
        return self.last(self.first(grid))


def test_places_are_in_the_order_of_the_forward_pass() -> None:
    listed = insertion.places(Backwards(), image)
    assert [place.path for place in listed] == ["first.0", "first.1", "first", "last", ""]
    assert [place.channels for place in listed] == [4, 4, 4, 5, 5]


def test_a_layout_that_nothing_confirms_is_listed_when_it_is_given() -> None:
    model, example = nn.Flatten(2), torch.rand(2, 7, 1, 1)
    assert insertion.places(model, example) == []
    (first,) = insertion.places(model, example, layout="channels_first")
    (last,) = insertion.places(model, example, layout="channels_last")
    assert (first.channels, first.size) == (7, (1,))
    assert (last.channels, last.size) == (1, (7,))


def state(model: nn.Module) -> Any:
    hooks = [(path, sorted(vars(module)), module.training) for path, module in model.named_modules()]
    counts = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    values = [(name, value.tolist()) for name, value in model.state_dict().items()]
    return hooks, counts, values, torch.get_rng_state().tolist(), random.getstate()


def test_the_model_is_the_same_afterwards() -> None:
    model = nn.Sequential(Net(), nn.Dropout(0.5)).train()
    model[0].stage[1].eval()
    model[0].stem.register_forward_hook(lambda module, inputs, outputs: None)
    before = state(model)
    assert insertion.places(model, image)
    assert state(model) == before


def test_additions_are_not_listed_nor_places_that_have_one() -> None:
    model = Net()
    every = [place.path for place in insertion.places(model, image)]
    insert(model, ["stage", "stem"], identity, example=image)
    left = [place.path for place in insertion.places(model, image)]
    assert left == [path for path in every if path not in ("stage", "stem")]
    assert not any(CHILD in path for path in left)
    model = Pyramid(dict)
    insert(model, "levels[pool]", identity, example=image)
    assert [place.path for place in insertion.places(model, image)] == ["levels.conv", "levels[0]"]


def test_a_part_that_is_compiled_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    monkeypatch.setattr(torch, "compile", lambda function: function)
    model.stage.compile()
    assert [place.path for place in insertion.places(model, image)] == ["stem"]


def test_a_model_without_grids_has_no_places() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.ReLU())
    assert insertion.places(model, torch.rand(2, 2, 4)) == []


class Silent(nn.Module):
    def forward(self, grid: Tensor) -> None:
        return None


@pytest.mark.parametrize(
    ("model", "example", "layout", "error", "text"),
    [
        ("net", image, None, TypeError, r"^places: model must be .*, got str; fix: the network, "),
        (Net(), image, "last", ValueError, r"^places: layout must be one of channels_first, channels_last, got 'last'"),
        (Net(), image[0, 0], None, ValueError, r"^places: Net refuses example \(12, 16\) of torch\.float32: "),
        (
            nn.Conv2d(3, 4, 1),
            image[0],
            None,
            ValueError,
            r"^places: example \(3, 12, 16\) has no batch: .*\n  fix: .*, example\[None\]\.$",
        ),
        (Net(), (1, 3, 8, 8), None, ValueError, r"fix: an input and not its shape: torch\.zeros\(1, 3, 8, 8\)\.$"),
        (Silent(), image, None, ValueError, r"^places: Silent returns no tensor for this example"),
        (torch.jit.trace(nn.ReLU(), image), image, None, ValueError, r"^places: the model is scripted, and"),
    ],
)
def test_errors_are_those_of_insert(model: Any, example: Any, layout: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        insertion.places(model, example, layout=layout)


# ---- places that need more than a grid -------------------------------------------------------------------------------
class Doubled(nn.Sequential):
    """Runs its children by the class's own way, and does more."""

    def forward(self, grid: Tensor) -> Tensor:
        return 2 * super().forward(grid)


class Fixed(nn.Sequential):
    """Fails with one more child."""

    def forward(self, grid: Tensor) -> Tensor:
        convolution, activation = self.children()
        return activation(convolution(grid))


class Odd(nn.Module):
    """A host that would call its addition twice, one that fails with it, and a grid that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.doubled, self.fixed = (kind(nn.Conv2d(3, 3, 1), nn.ReLU()) for kind in (Doubled, Fixed))
        self.unused, self.order = nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())

    def forward(self, grid: Tensor) -> Tensor:
        self.unused(grid)
        return self.order(self.fixed(self.doubled(grid)))


class Counted(Odd):
    def last(self) -> nn.Module:
        return self.order[-1]


class Blocked(nn.Module):
    """A grid that autograd leads to, and of which no number reaches the output; one without a gradient that does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked, self.frozen, self.scaled = (nn.Conv2d(3, 3, 1) for _ in range(3))

    def forward(self, grid: Tensor) -> Tensor:
        blocked = torch.where(torch.zeros_like(grid, dtype=torch.bool), self.blocked(grid), 0)
        return blocked + self.frozen(grid).detach() + 1e-6 * self.scaled(grid).relu_()


def test_a_grid_of_which_no_number_reaches_the_output_is_not_listed() -> None:
    model = Blocked().eval()
    listed = [place.path for place in insertion.places(model, image)]
    assert listed == ["frozen", "scaled", ""]
    assert set(listed) == {path for path in paths(model, image) if accepts(model, path, image, None)}
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [Odd, Counted])
def test_a_host_that_cannot_have_an_addition_is_not_listed(kind: type[Odd]) -> None:
    model = kind().eval()
    before = state(model)
    listed = [place.path for place in insertion.places(model, image)]
    assert state(model) == before
    inside = ["doubled.0", "doubled.1", "fixed.0", "fixed.1", "order.0", "order.1"]
    assert listed == [*inside, *(["order"] if kind is Odd else []), ""]
    accepted = {path for path in paths(model, image) if accepts(model, path, image, None)}
    # By its other name, a place is accepted too.
    assert accepted == set(listed) | {"order"}


class Joint(nn.Sequential):
    """A convolution and a norm that run as one where nobody listens to them; not for one more."""

    def forward(self, grid: Tensor) -> Tensor:
        convolution, norm = self
        if is_bare(convolution, nn.Conv2d) and is_bare(norm, nn.BatchNorm2d):
            weight, bias = fuse_conv_bn_weights(
                convolution.weight,
                convolution.bias,
                norm.running_mean,
                norm.running_var,
                norm.eps,
                norm.weight,
                norm.bias,
            )
            return F.conv2d(grid, weight, bias, convolution.stride, convolution.padding)
        return norm(convolution(grid))


def joint() -> nn.Module:
    """Layers that run as one, before blocks that take attention apart."""
    first = Joint(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8))
    return nn.Sequential(first, nn.Sequential(Block(8, 8, "siamese"), Block(8, 8, "kronecker_kv")))


def test_layers_that_run_as_one() -> None:
    model = joint().eval()
    listed = {place.path for place in insertion.places(model, image)}
    assert {"0.0", "0.1", "1.0.near.1", "1.0.norm", "1.0", "1.1.attention", "1.1", "1"} <= listed
    assert "0" not in listed
    # The values' projection gets means along axes, channels last.
    layouts = (None, "channels_last")
    assert listed == {
        path for path in paths(model, image) if any(accepts(model, path, image, each) for each in layouts)
    }


def auto_encoder() -> nn.Module:
    """Its attention returns a grid of a batch of one whose strides fit two memory formats."""
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return pytest.importorskip("diffusers").AutoencoderKL(block_out_channels=(16, 32), norm_num_groups=4, **kinds)


@pytest.mark.parametrize(
    ("build", "where"),
    [
        (joint, ["0.*", "1.0.near.*", "1.1.attention", "1.*.norm", "1.*", "1"]),
        (auto_encoder, ["encoder.mid_block", "*coder.mid_block.attentions.0", "*coder.mid_block.resnets.*"]),
    ],
    ids=["joint", "auto-encoder"],
)
def test_the_output_is_as_exact_as_before(build: Callable[[], nn.Module], where: list[str]) -> None:
    # To the bit where the same kernels run. Else the numbers are rounded in another order, which is no worse: at most
    # twice the model's own distance from its output in float64.
    torch.manual_seed(0)
    model, example = build().eval(), torch.rand(1, 3, 16, 16)

    def output(model: nn.Module, example: Tensor) -> Tensor:
        with torch.no_grad():
            given = model(example)
        return given if isinstance(given, Tensor) else given.sample

    before, exact = output(model, example), output(copy.deepcopy(model).double(), example.double())
    added = insert(model, where, identity, example=example, layout="channels_first")
    grids: list[bool] = []
    for module in added.values():
        module.register_forward_hook(lambda module, inputs, grid: grids.append(torch.equal(inputs[0], grid)))
    error = (output(model, example) - exact).norm()
    assert all(grids)
    assert len(grids) == len(added) >= 7
    assert error <= 2 * (before - exact).norm()
