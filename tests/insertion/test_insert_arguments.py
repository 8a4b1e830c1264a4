"""Arguments of `insert` in another order or of another kind: each has its own error, and nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from farfield import insert
from farfield.nn import GridAttention, NormedAttention, attention_for


def host() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))


def make(channels: int) -> nn.Module:
    return GridAttention(channels, "averaged", project="qkvo", residual=True)


HOST: Any = host()
IMAGE = torch.randn(1, 3, 16, 16)
CALL = r"fix: insert\(model, where, make, example=…\)\."


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("0", host(), make), rf"^insert: model is str and where is Sequential; {CALL}"),
        ((host(), make, "0"), rf"^insert: where must be a path of a module or several, got a function; {CALL}"),
        ((host(), 7, make), rf"^insert: where must be a path of a module or several, got int; {CALL}"),
        ((host(), 0, make), r'^insert: where must be a path of a module or several, got int; fix: its path, "0"\.$'),
        ((HOST, [HOST[1]], make), r'^insert: where must be a path .*, got \w+; fix: its path, "1"\.$'),
        ((HOST, HOST[1], make), r'^insert: where must be a path .*, got \w+; fix: its path, "1"\.$'),
        ((host(), HOST[1], make), rf"^insert: where must be a path of a module or several, got \w+; {CALL}"),
        ((None, "0", make), r"^insert: model must be a torch\.nn\.Module, got NoneType"),
        (
            (host(), "0", make(8)),
            r'got a module, GridAttention; fix: lambda channels: GridAttention\(channels, "averaged"\)\.$',
        ),
        ((host(), "0", GridAttention), r"make must be a function of the channels alone, .* fix: attention_for, or "),
        ((host(), "0", NormedAttention), r"NormedAttention takes an attention; fix: attention_for, or "),
        (
            (host(), "0", "averaged"),
            r"got 'averaged'; fix: lambda channels: attention_for\(channels, 'averaged'\)\.$",
        ),
        (
            (host(), "0", attention_for(8, "averaged")),
            r'got a module, NormedAttention; fix: lambda channels: attention_for\(channels, "averaged"\)\.$',
        ),
    ],
)
def test_arguments_of_another_kind(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        insert(*arguments, example=IMAGE)


class Strict(nn.Module):
    """A model that takes batches of floating-point images alone, also where its layers take more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = host()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.dim() != 4 or not images.is_floating_point():
            raise ValueError("no batch of images")
        return self.layers(images)


@pytest.mark.parametrize(
    ("example", "fix", "repaired"),
    [
        (IMAGE[0], r"add the batch, example\[None\]\.", IMAGE),
        (IMAGE.byte(), r"example\.to\(torch\.float32\)\.", IMAGE),
        ((1, 3, 16, 16), r"an input and not its shape: torch\.zeros\(1, 3, 16, 16\)\.", torch.zeros(1, 3, 16, 16)),
        (IMAGE[0, 0], r"an input that model\(example\) takes\.", IMAGE),
    ],
)
def test_the_fix_of_an_example_works(example: Any, fix: str, repaired: torch.Tensor) -> None:
    model = Strict()
    with pytest.raises(ValueError, match=rf"^insert: Strict refuses example [\s\S]*\n  fix: {fix}$"):
        insert(model, "layers.0", make, example=example)
    assert list(insert(model, "layers.0", make, example=repaired)) == ["layers.0"]


@pytest.mark.parametrize(
    ("example", "fix"),
    [
        (torch.randn(1, 16, 16, 3), "fix: channels first, example.movedim(-1, 1)."),
        (IMAGE.numpy(), "fix: a tensor, torch.as_tensor(example)."),
    ],
)
def test_fixes_of_other_examples(example: Any, fix: str) -> None:
    with pytest.raises(ValueError, match="Sequential refuses example") as raised:
        insert(host(), "0", make, example=example)
    assert fix in str(raised.value)
    assert str(raised.value).count("\n") < 12


def test_an_example_without_a_batch_which_convolutions_take() -> None:
    model = host()
    with pytest.raises(ValueError, match=r"^insert: example \(3, 16, 16\) .*no batch.*\n  fix: .*example\[None\]"):
        insert(model, "0", make, example=IMAGE[0])
    assert list(insert(model, "0", make, example=IMAGE[0][None])) == ["0"]


def test_a_batch_that_looks_like_channels_is_taken() -> None:
    """Three sequences, of which the model makes images of three channels itself."""

    class Spectrograms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))

        def forward(self, waves: torch.Tensor) -> torch.Tensor:
            if waves.dim() != 3:
                raise ValueError("(batch, height, width)")
            return self.layers(waves[:, None].expand(-1, 3, -1, -1))

    assert list(insert(Spectrograms(), "layers.0", make, example=torch.randn(3, 16, 16))) == ["layers.0"]


def test_the_output_of_the_model_itself_is_named() -> None:
    flat = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    with pytest.raises(ValueError, match="insert: the model returns"):
        insert(flat, "", make, example=IMAGE)


def test_an_addition_that_fails_on_its_own_is_the_cause() -> None:
    with pytest.raises(ValueError, match=r"insert: .*addition at 0 .*\(1, 8, 14, 14\)") as raised:
        insert(host(), "0", lambda channels: nn.Conv2d(5, 5, 1), example=IMAGE)
    assert "fix: make must return a module" in str(raised.value)
