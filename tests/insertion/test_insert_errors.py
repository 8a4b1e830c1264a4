"""What insert and remove refuse, in which words, and that a refusal leaves the model as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farfield import ShapeError, insert, remove
from farfield.insertion import places
from farfield.nn import attention_for
from helpers.small_hosts import Block, Levels, Net, Pyramid, Tokens, felt, identity, image


def refused(kind: type[Exception], text: str, model: Any, where: Any, **options: Any) -> None:
    """Insert must fail in these words, and without a trace."""
    before = list(model.named_modules()) if isinstance(model, nn.Module) else []
    with pytest.raises(kind) as raised:
        insert(model, where, options.pop("make", identity), **{"example": image, **options})
    assert text in str(raised.value)
    if before:
        assert list(model.named_modules()) == before
        assert not any("farfield" in module._forward_hooks for module in model.modules())


# ---- paths -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("where", "text"),
    [
        (
            "stages",
            'insert: no module of Net matches "stages"; it has stem, stage, head, unused; nearest: stage',
        ),
        ("stage.7", 'insert: no module of Net matches "stage.7"; stage has 0, 1, 2; nearest: stage'),
        (["stem", "head.*"], 'insert: no module of Net matches "head.*"; head has no children'),
        ("blocks.0.norm", 'insert: no module of Net matches "blocks.0.norm"; it has stem, stage, head, unused'),
        ("*.conv", 'insert: no module of Net matches "*.conv"'),
    ],
)
def test_unknown_path(where: Any, text: str) -> None:
    refused(LookupError, text, Net(), where)


def test_odd_paths() -> None:
    refused(ValueError, 'insert: a place is a path, or a path and one entry as in "fpn[pool]"; got "a[0', Net(), "a[0")
    for nothing in ([], None):
        refused(ValueError, "insert: where names no place; fix: give at least one path.", Net(), nothing)
    net = Net()
    net.trunk = net.stem
    refused(ValueError, 'insert: "trunk" and "stem" are one module; fix: name one of them.', net, ["trunk", "stem"])
    text = "insert: model must be a torch.nn.Module, got str; fix: the network, after network.load_state_dict("
    refused(TypeError, text, "net", "stem")
    refused(ValueError, "insert: layout must be one of channels_first, channels_last", Net(), "stem", layout="NCHW")


# ---- calls -----------------------------------------------------------------------------------------------------------
def test_never_called() -> None:
    text = "insert: unused is never called with this example, in eval; its weights may be read without a call."
    refused(ValueError, text + "\n  fix: insert at a module that runs: stem, stage, head.", Net(), "unused")


def test_weights_read_without_a_call() -> None:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
    text = "insert: layers.0.self_attn.out_proj is never called"
    example = torch.rand(2, 5, 8)
    refused(ValueError, text, net, "layers.0.self_attn.out_proj", example=example, layout="channels_last")


def test_a_list_of_modules_is_never_called() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(3), Block(3)])

        def forward(self, grid: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](grid))

    text = "blocks is never called with this example, in eval; its weights may be read without a call.\n"
    refused(ValueError, text + "  fix: insert at a module that runs: blocks.0, blocks.1.", Listed(), "blocks")


def test_shared_activation() -> None:
    text = (
        "insert: stage.1.relu is called 2 times while stage.1 is called once, and one addition would change the output "
        'of every call.\n  fix: insert at "stage.1" or "stage" or "stem", which is called once.'
    )
    refused(ValueError, text, Net(), ["stem", "stage.1.relu"])


class Loop(nn.Sequential):
    """Runs its own children in a way of its own."""

    def forward(self, grid: Tensor) -> Tensor:
        for child in self:
            grid = child(grid)
        return grid


class Late(nn.Module):
    """Calls a part only after something has been added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, grid: Tensor) -> Tensor:
        return self.conv.forward(grid) if hasattr(self.conv, "farfield") else self.conv(grid)


def test_an_addition_must_be_called_as_often_as_its_host() -> None:
    fix = "if the module at a place calls its children in a loop, insert at one of them or at the module around it."
    text = f"was called once and its addition 2 times, so all additions were taken out again.\n  fix: {fix}"
    refused(ValueError, f"insert: 0 {text}", nn.Sequential(Loop(nn.Conv2d(3, 3, 1)), nn.ReLU()), ["1", "0"])
    text = "insert: conv was called never and its addition never, so all additions were taken out again."
    refused(ValueError, text, Late(), "conv")


# ---- what places return ----------------------------------------------------------------------------------------------
SHAPES = "0: (2, 8, 12, 16) of torch.float32, {}: (2, 8, 6, 8) of torch.float32"


@pytest.mark.parametrize(("kind", "last"), [(tuple, "1"), (list, "1"), (dict, "pool")])
def test_several_grids_need_an_entry(kind: Any, last: str) -> None:
    text = (
        f"insert: levels returns several values, {kind.__name__}({SHAPES.format(last)}); fix: choose an entry, "
        f'"levels[0]" for example.'
    )
    refused(TypeError, text, Pyramid(kind), "levels")
    refused(LookupError, f'insert: no entry of levels "2"; it has 0, {last}.', Pyramid(kind), "levels[2]")


def test_entries_that_are_none() -> None:
    text = 'insert: stem returns (2, 8, 12, 16) of torch.float32 and has no entries; fix: insert at "stem".'
    refused(TypeError, text, Net(), "stem[0]")
    net = nn.Sequential(nn.AdaptiveMaxPool2d(4, return_indices=True))
    text = "insert: 0[1] must return a grid of floats, got (2, 3, 4, 4) of torch.int64."
    refused(TypeError, text, net, "0[1]")

    class Bad(Levels):
        def forward(self, grid: Tensor) -> Any:
            return {"a.b": grid, "values": grid}

    for entry in ("a.b", "values"):
        text = f'insert: entry "{entry}" of the model cannot be the name of a module; fix: insert at the'
        refused(ValueError, text, Bad(dict), f"[{entry}]")


def test_no_size() -> None:
    refused(ShapeError, "insert: head returns (2, 5), which has no spatial dims to attend over.", Net(), "head")


# ---- layouts ---------------------------------------------------------------------------------------------------------
def test_channels_last_without_a_layout() -> None:
    text = (
        "insert: blocks.0 returns (2, 12, 10), and (2, 24, 10) at another input size: dimension 1, the channels of "
        'layout="channels_first", is spatial.\n  fix: layout="channels_last".'
    )
    refused(ShapeError, text, Tokens(), "blocks.0")
    text = 'the channels of layout="channels_first", is spatial.\n  fix: layout="channels_last".'
    refused(ShapeError, text, Tokens(flat=False), "blocks")
    refused(ShapeError, text, Tokens().blocks, "0", example=torch.rand(2, 7, 10))


@pytest.mark.parametrize("where", ["blocks", "blocks.0", "blocks.1.linear"])
def test_channels_last_without_a_layout_at_one_size(where: str) -> None:
    text = (
        f"insert: {where} returns (2, 9, 10), and no other input size shows which dimension holds the channels; "
        f'its weights have 10.\n  fix: layout="channels_last".'
    )
    refused(ShapeError, text, Tokens(fixed=12), where, example=image[..., :12])
    text = 'its weights have 10.\n  fix: layout="channels_last".'
    refused(ShapeError, text, Tokens(fixed=12, flat=False), where, example=image[..., :12])


def test_nothing_tells_the_channels() -> None:
    # As many tokens as channels.
    net = Tokens(fixed=8)
    net.patches, net.blocks = nn.Conv2d(3, 4, 4, 4), nn.Sequential(nn.LayerNorm(4))
    text = (
        "its weights fit both of 4 and 4.\n"
        '  fix: choose one, layout="channels_first" for 4 channels or layout="channels_last" for 4.'
    )
    refused(ShapeError, text, net, "blocks", example=image[..., :8, :8])
    # Either is taken when it is said, so that nobody is sent from one to the other.
    for layout in ("channels_first", "channels_last"):
        insert(net, "blocks", identity, example=image[..., :8, :8], layout=layout)
        remove(net)


def test_two_layouts_in_one_call() -> None:
    class Both(Tokens):
        def forward(self, grid: Tensor) -> Tensor:
            return self.blocks(self.patches(grid).flatten(2).movedim(1, -1)).mean(1)

    fix = '\n  fix: two calls, layout="channels_first" for patches and layout="channels_last" for blocks.'
    text = 'the channels of layout="channels_first", is spatial.' + fix
    refused(ShapeError, text, Both(), ["patches", "blocks"])
    refused(ShapeError, text, Both(), ["blocks", "patches"], layout="channels_first")

    fix = 'fix: two calls, layout="channels_last" for blocks and layout="channels_first" for patches.'
    refused(ShapeError, fix, Both(), ["patches", "blocks"], layout="channels_last")


def test_channels_first_with_the_other_layout() -> None:
    text = 'the channels of layout="channels_last", is spatial.\n  fix: layout="channels_first".'
    refused(ShapeError, text, Net(), "stage", layout="channels_last")
    refused(ShapeError, text, nn.Sequential(nn.Conv1d(3, 6, 3)), "0", example=image[:, :, 0], layout="channels_last")


@pytest.mark.parametrize("operator", ["kronecker_kv", "kronecker_qkv", "softmax_pooled"])
def test_tokens_have_neither_axes_nor_neighbours(operator: str) -> None:
    def make(channels: int) -> nn.Module:
        return attention_for(channels, operator)

    text = f"insert: blocks.0 returns tokens, and {operator} "
    refused(ValueError, text, Tokens(), "blocks.0", make=make, layout="channels_last")
    # Of a grid with its channels last, and of a sequence with its channels first, they are axes.
    assert insert(Tokens(flat=False), "blocks.0", make, example=image, layout="channels_last")
    sequence = image[:, :, 0]
    assert insert(nn.Sequential(nn.Conv1d(3, 16, 3)), "0", make, example=sequence, layout="channels_first")


def test_the_batch_must_come_first() -> None:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False)
    text = "insert: layers.0 has the batch as its second dimension; fix: build the model with batch_first=True."
    refused(ValueError, text, net, "layers.0", example=torch.rand(5, 2, 8), layout="channels_last")

    class Turned(Tokens):
        def forward(self, grid: Tensor) -> Tensor:
            return self.blocks(self.patches(grid).flatten(2).permute(2, 0, 1)).mean(0)

    text = "insert: blocks returns (12, 2, 10), and (12, 4, 10) for twice the batch, which may change only the first"
    refused(ShapeError, text, Turned(), "blocks", layout="channels_last")


# ---- additions -------------------------------------------------------------------------------------------------------
def test_twice_at_one_place() -> None:
    net, levels = Net(), Pyramid(dict)
    insert(net, ["stage", "stem"], identity, example=image)
    insert(levels, "levels[0]", identity, example=image)
    for model, place in ((net, "stage"), (net, "stem"), (levels, "levels[0]")):
        with pytest.raises(
            ValueError, match=re.escape(f'{place} has an addition already; fix: remove(model, "{place}"')
        ):
            insert(model, place, identity, example=image)
    assert len(net.stage) == 4


def test_a_sequence_that_stands_for_its_last_child() -> None:
    class Counted(Net):
        def depth(self) -> int:
            return len(self.stage)

    text = 'insert: "stage" and "stage.2" are one module; fix: name one of them.'
    refused(ValueError, text, Counted(), ["stage", "stage.2"])
    refused(ValueError, text, Counted(), ["stage", "stage.*"])
    net = Counted()
    insert(net, "stage", identity, example=image)
    for where in ("stage", "stage.2"):
        with pytest.raises(
            ValueError, match=r'^insert: stage\.2 has an .* already; fix: remove\(model, "stage\.2"\) first'
        ):
            insert(net, where, identity, example=image)
    remove(net, "stage.2")
    insert(net, "stage", identity, example=image)


def test_a_host_with_the_name_of_its_own() -> None:
    net = Net()
    net.stem.farfield = 3
    refused(ValueError, 'insert: stem already has an attribute "farfield", the name under which', net, "stem")
    net = Net()
    net.stage.add_module("farfield", nn.Conv2d(12, 12, 1))
    refused(ValueError, 'insert: stage already has an attribute "farfield", the name under which', net, "stage")
    with pytest.raises(LookupError, match=r"remove: Net .*no additions; fix: insert"):
        remove(net)


# ---- effects ---------------------------------------------------------------------------------------------------------
class Drops(nn.Module):
    """Goes on with its second grid; the first is for whoever wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.levels, self.head = Levels(tuple), nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.levels(image)[1].mean((2, 3)))


def test_an_addition_without_effect() -> None:
    text = (
        "insert: levels[0] has no effect: whatever its addition returns, Drops returns the same for this "
        'example.\n  fix: insert at "levels[1]" or "levels.conv".'
    )
    refused(ValueError, text, Drops(), "levels[0]")
    refused(ValueError, text, Drops(), ["levels[1]", "levels[0]"])
    insert(Drops(), "levels[1]", identity, example=image)
    # The entry that is named is one that counts.
    refused(TypeError, 'fix: choose an entry, "levels[1]" for example.', Drops(), "levels")


def test_an_effect_that_is_too_small_to_see_is_one() -> None:
    class Faint(Net):
        def forward(self, image: Tensor) -> Tensor:
            return self.head(1 + 1e-30 * self.stage(self.stem(image)).mean((2, 3)))

    net = Faint()
    assert torch.equal(net(image), net(2 * image))
    insert(net, "stage", identity, example=image)


class Detector(Drops):
    """Keeps what it is sure of, which is nothing."""

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        scores = super().forward(image)
        return {"scores": scores[scores > 1e9]}


def test_a_detector_that_finds_nothing() -> None:
    insert(Detector(), "levels[1]", identity, example=image)
    refused(ValueError, "levels[0] has no effect", Detector(), "levels[0]")


def test_a_model_that_returns_nothing_to_see_an_effect_in() -> None:
    """Backbones of transformers return no features where their configuration names a stage that is not there."""

    class Nothing(Net):
        def forward(self, image: Tensor) -> dict[str, tuple[Tensor, ...]]:
            super().forward(image)
            return {"features": ()}

    text = "insert: Nothing returns no tensor for this example, so the effect of an addition cannot be checked."
    refused(ValueError, text, Nothing(), "stage")


class PassesOn(nn.Module):
    """Returns its first grid as it is, beside what it makes of the second, as CoaT's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 1)

    def forward(self, grids: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return grids[0], self.conv(grids[1])


class Scales(nn.Module):
    """Two such blocks; the head reads the second grid alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.head = nn.Conv2d(3, 6, 1), PassesOn(), PassesOn(), nn.Linear(6, 5)

    def forward(self, image: Tensor) -> Tensor:
        grid = self.stem(image)
        return self.head(self.two(self.one((grid, grid)))[1].mean((2, 3)))


def test_an_addition_that_ends_in_a_later_block_has_no_effect() -> None:
    refused(ValueError, "one[0] has no effect", Scales(), "one[0]")
    insert(Scales(), "one[1]", identity, example=image)


class Windows(nn.Module):
    """Attends within windows of 4 × 4, which it stacks along the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block = nn.Conv2d(3, 8, 1), nn.Module()
        self.block.attn = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.block.forward = self.windows

    def windows(self, grid: Tensor) -> Tensor:
        parts = grid.unflatten(2, (-1, 4)).unflatten(4, (-1, 4)).permute(0, 2, 4, 3, 5, 1)
        parts = self.block.attn(parts.flatten(0, 2).flatten(1, 2)).view(parts.shape)
        return parts.permute(0, 5, 1, 3, 2, 4).reshape(grid.shape)

    def forward(self, image: Tensor) -> Tensor:
        return self.block(self.patches(image))


def test_windows_are_not_the_batch() -> None:
    text = (
        "insert: block.attn returns (24, 16, 8) for a batch of 2: its first dimension is not the batch but parts of "
        "it, windows for example, and an addition would attend within each part alone.\n"
        '  fix: insert at "block".'
    )
    refused(ShapeError, text, Windows(), "block.attn", layout="channels_last")
    # As many windows as samples, with one size: what is in the window or around it, is seen at another.
    text = (
        "insert: block.attn returns (1, 16, 8) for a batch of 1 and (4, 16, 8) at another input size: its first "
        "dimension is not the batch but parts of it, windows for example, and an addition would attend within each "
        'part alone.\n  fix: insert at "block".'
    )
    refused(ShapeError, text, Windows(), "block.attn", example=image[:1, :, :4, :4])
    insert(Windows(), "block", identity, example=image)


class Nested(nn.Module):
    """Returns its tokens with their sides, in a tuple in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.stage = nn.Conv2d(3, 8, 4, 4), nn.Module()
        self.stage.blocks, self.stage.forward = nn.ModuleList([Block(8), Block(8)]), self.run

    def run(self, grid: Tensor) -> Any:
        for block in self.stage.blocks:
            grid = block(grid)
        return ((grid,), *grid.shape[2:])

    def forward(self, image: Tensor) -> Tensor:
        return self.stage(self.patches(image))[0][0]


def test_nested_outputs() -> None:
    text = "insert: stage returns several values, tuple(0: tuple(0: (2, 8, 3, 4) of torch.float32), 1: int, 2: int); "
    text += 'fix: insert at "stage.blocks.1" or "stage.blocks.0".'
    refused(TypeError, text, Nested(), "stage")
    insert(Nested(), "stage.blocks.1", identity, example=image)


class Constant(nn.Module):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, grid: Tensor) -> Any:
        return self.answer(grid)


@pytest.mark.parametrize(
    ("kind", "answer", "text"),
    [
        (ShapeError, lambda grid: grid[:, :1], "at unused must keep the shape (2, 8, 12, 16), got (2, 1, 12, 16)."),
        (TypeError, lambda grid: grid.double(), "must keep torch.float32 on cpu, got torch.float64 on cpu."),
        (TypeError, lambda grid: (grid, grid), "must return a tensor, got tuple."),
        (ValueError, lambda grid: grid / 0, "returns non-finite numbers for finite torch.float32 inputs."),
        (
            ValueError,
            lambda grid: grid @ grid,
            "the addition at unused fails on its grid (2, 8, 12, 16), so all additions were taken out again: ",
        ),
    ],
)
def test_additions_that_do_not_keep_what_they_are_given(kind: type[Exception], answer: Any, text: str) -> None:
    class Last(Net):
        def forward(self, grid: Tensor) -> Any:
            return self.unused(self.stem(grid))

    refused(kind, text, Last(), "unused", make=lambda channels: Constant(answer))


def test_make() -> None:
    def wrong(channels: int) -> Iterator[int]:
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError) as raised:
        insert(Net(), "stem", wrong, example=image)
    assert raised.value.__notes__ == ["insert: this was make(8), for stem."]
    refused(TypeError, "insert: make(8) must return a module, got int.", Net(), "stem", make=int)
    one = identity(12)
    text = "insert: make returned one module for two places; fix: make a new one for each."
    refused(ValueError, text, Net(), ["stage.0", "stage.1"], make=lambda channels: one)


# ---- models that cannot take one -------------------------------------------------------------------------------------
def test_compiled_scripted_wrapped() -> None:
    net, fixed = torch.compile(Net()), "compiled, and its code is fixed; fix: "
    again = "insert(model._orig_mod, where, make, example=…), and torch.compile that again."
    refused(ValueError, f"insert: the model is {fixed}{again}", net, "stem")
    assert insert(net._orig_mod, "stem", identity, example=image)
    with pytest.raises(ValueError) as raised:  # noqa: PT011  The text is compared below.
        remove(net)
    assert str(raised.value) == (f"remove: the model is {fixed}remove(model._orig_mod), and torch.compile that again.")
    remove(net._orig_mod)
    with pytest.raises(ValueError) as raised:  # noqa: PT011  The text is compared below.
        places(net, image)
    assert str(raised.value) == f"places: the model is {fixed}places(model._orig_mod, example)."
    assert places(net._orig_mod, image)
    model = nn.Sequential(torch.compile(nn.Conv2d(3, 8, 1)))
    with pytest.raises(ValueError, match=r"^insert: 0 is compiled, .* and torch\.compile it again") as raised:
        insert(model, "0", identity, example=image)
    eval(re.search(r"fix: (.*) first, and", str(raised.value))[1], {"model": model})
    assert insert(model, "0", identity, example=image)
    net = Net()
    net.stage.compile()
    before = 'insert(model, where, make, example=…) before model.get_submodule("stage").compile().'
    refused(ValueError, f"insert: stage is {fixed}{before}", net, "stage.0")
    for net in (torch.jit.trace(nn.Sequential(nn.Conv2d(3, 8, 1)), image), torch.jit.script(nn.Sequential(nn.ReLU()))):
        with pytest.raises(ValueError, match=r"is scripted, .*; fix: insert\(the module .*, and script that\."):
            insert(net, "0", identity, example=image)
        with pytest.raises(ValueError, match=r"; fix: places\(.*, example\)"):
            places(net, image)
    refused(ValueError, "insert: 0 is scripted", nn.Sequential(torch.jit.script(nn.ReLU())), "0")
    # What lies beside is no matter.
    net = Net()
    net.unused.compile()
    insert(net, "stage", identity, example=image)


def test_an_example_that_the_host_refuses() -> None:
    text = (
        "insert: Net refuses example (2, 2, 12, 16) of torch.float32: RuntimeError: Given groups=1, weight of size "
        "[8, 3, 3, 3], expected input[2, 2, 12, 16] to have 3 channels"
    )
    refused(ValueError, text, Net(), "stage", example=image[:, :2])
    text = "\n  its weights are torch.float16 on cpu."
    refused(ValueError, text, Net().half(), "stage")
    # The host's own error, and not one of looking at it.
    text = "Tensor on device meta is not on the expected device cpu!\n  its weights are torch.float32 on meta."
    refused(ValueError, text, Net().to("meta"), "stage")
    text = "Net refuses example dict(picture: (2, 3, 12, 16) of torch.float32, size: int): TypeError: "
    refused(ValueError, text, Net(), "stage", example={"picture": image, "size": 3})


# ---- remove ----------------------------------------------------------------------------------------------------------
def test_remove_without_insert() -> None:
    net = Net()
    with pytest.raises(LookupError, match=r"^remove: Net .*no additions; fix: insert"):
        remove(net)
    with pytest.raises(LookupError, match=r"^remove: Net has no additions"):
        remove(net, "stage")
    insert(net, ["stem", "stage.1"], felt, example=image)
    with pytest.raises(LookupError, match=r'^remove: no addition at "stage"; there are stem, stage\.1\.$'):
        remove(net, ["stem", "stage"])
    # All or nothing.
    assert hasattr(net.stem, "farfield")
    with pytest.raises(LookupError, match=r'^remove: no module of Net matches "stages"; it has'):
        remove(net, "stages")
