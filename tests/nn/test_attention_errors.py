"""What `GridAttention` refuses, and how it says so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from farfield import ShapeError
from farfield.nn import GridAttention


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"operator": "siamse"}, LookupError, 'GridAttention: no operator "siamse"; nearest: siamese'),
        ({"operator": "attention of mine"}, LookupError, 'GridAttention: no operator "attention of mine"'),
        ({"heads": 3}, ShapeError, "GridAttention: heads=3 does not divide the 8 channels of query; try heads=2."),
        ({"heads": 0}, ValueError, "GridAttention: heads must be a whole number from 1, got 0"),
        ({"heads": np.int64(2)}, ValueError, "heads must be a whole number from 1, got .*2.*; fix: int.2."),
        ({"heads": torch.tensor(2)}, ValueError, "heads must be a whole number from 1, got .*2.*; fix: int.2."),
        ({"heads": 4, "value_channels": 6}, ShapeError, "heads=4 does not divide the 6 channels of value; try heads=3"),
        ({"project": "qvq"}, ValueError, "GridAttention: project='qvq' must be letters of \"qkvo\""),
        ({"project": "vv"}, ValueError, "GridAttention: project='vv' must be letters of \"qkvo\""),
        ({"project": "x"}, ValueError, "GridAttention: project='x' must be letters of \"qkvo\""),
        ({"project": "v", "inner_channels": 4}, ValueError, "inner_channels=4 needs queries and keys projected"),
        ({"project": "qv", "inner_channels": 4}, ValueError, "inner_channels=4 needs queries and keys projected"),
        (
            {"project": "vo", "inner_channels": 4},
            ValueError,
            'projected to them, got project=.vo.; fix: project="qkvo"',
        ),
        (
            {"operator": "siamese_local", "project": "v", "inner_channels": 4},
            ValueError,
            'fix: project="qv" or leave inner_channels out',
        ),
        ({"project": "qk", "value_channels": 4}, ValueError, 'value_channels=4 needs values projected.*project="qkv"'),
        ({"value_channels": 4, "residual": True}, ValueError, 'adds 8 channels to 4; fix: project="vo"'),
        ({"operator": "siamese_local", "project": "qkv"}, ValueError, 'siamese_local reads no keys; fix: project="qv"'),
        (
            {"scale": 0.5},
            ValueError,
            "averaged has no softmax of products to scale, got scale=0.5; fix: leave scale out",
        ),
    ],
    ids=lambda value: None if not isinstance(value, dict) else ",".join(f"{k}={v}" for k, v in value.items()),
)
def test_options_that_do_not_fit(options: dict, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        GridAttention(8, **{"operator": "averaged", **options})


IMAGE = torch.randn(2, 8, 5, 5)
VALID = torch.ones(2, 5, 5, dtype=torch.bool)
TEXT = torch.randn(2, 8, 7)
# What is wrong: (arguments, error, what its text says, line by line).
MISFITS = {
    "rank": ({"grid": IMAGE[..., 0, 0]}, ShapeError, r"grid must be \(batch, channels, \*size\).*\(2, 8\)"),
    "channels": ({"grid": IMAGE[:, :6]}, ShapeError, r"8 channels, got 6.*Conv2d\(6, 8, 1\)"),
    "empty": ({"grid": IMAGE[..., :0]}, ShapeError, "grid has an empty dimension"),
    "integer": ({"grid": IMAGE.long()}, TypeError, "floating point, got torch.int64"),
    "complex": ({"grid": IMAGE * 1j}, TypeError, "floating point, got torch.complex64"),
    "dtype": ({"grid": IMAGE.double()}, TypeError, r"float64.*float32; fix: module.to\(grid.dtype\)"),
    "device": ({"grid": IMAGE.to("meta")}, ValueError, r"meta.*cpu; fix: module.to\(grid.device\)"),
    "mask sides": ({"mask": VALID[..., :4]}, ShapeError, r"mask must be.*\(2, 5, 4\).*\(2, 8, 5, 5\)"),
    "mask channel": ({"mask": VALID[:, None]}, ShapeError, r"mask must be.*\(2, 1, 5, 5\)"),
    "mask dtype": ({"mask": VALID.float()}, TypeError, "mask must be boolean"),
    "context channels": ({"context": TEXT[:, :6]}, ShapeError, "context.*8 channels, got 6"),
    "context batch": ({"context": TEXT[:1]}, ShapeError, r"batch.*\(2, 8, 5, 5\).*\(1, 8, 7\)"),
    "context dtype": ({"context": TEXT.double()}, TypeError, "float64"),
    "context rank": ({"context": TEXT[..., 0]}, ShapeError, r"context must be \(batch, channels, \*size\)"),
    "context mask": (
        {"context": TEXT, "context_mask": VALID[:, 0]},
        ShapeError,
        r"context_mask must be.*\(2, 5\).*\(2, 8, 7\)",
    ),
    "no context": ({"context_mask": VALID}, ValueError, "context_mask.*fix: give the context too"),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("row", ["averaged", "kronecker_qkv", "softmax"])
def test_inputs_that_do_not_fit(row: str, misfit: str) -> None:
    attention = GridAttention(8, row, heads=2)
    change, error, text = MISFITS[misfit]
    arguments = {"grid": IMAGE, **change}
    with pytest.raises(error, match=f"(?s)^GridAttention.*{text}"):
        attention(arguments.pop("grid"), arguments.pop("context", None), **arguments)


@pytest.mark.parametrize("row", ["averaged", "kronecker_qkv", "softmax"])
def test_a_module_without_parameters_checks_its_grids_too(row: str) -> None:
    attention, grid = GridAttention(8, row, project=""), torch.randn(2, 8, 5)
    with pytest.raises(TypeError, match=r"GridAttention.*torch\.float(32|64).*torch\.float(64|32)"):
        attention(grid, torch.randn(2, 8, 7, dtype=torch.float64))
    with pytest.raises(ShapeError, match=r"(?s)GridAttention.*batch"):
        attention(grid, torch.randn(1, 8, 7))


def test_a_summary_of_another_batch() -> None:
    attention = GridAttention(8, "averaged")
    summary = attention.summarize(torch.randn(3, 8, 7))
    with pytest.raises(ShapeError, match=r"(?s)GridAttention.*batch"):
        attention.respond(torch.randn(2, 8, 5), summary)


def test_no_arguments_by_position_but_grid_and_context() -> None:
    grid = torch.randn(2, 8, 5)
    with pytest.raises(TypeError, match="positional"):
        GridAttention(8, "averaged")(grid, None, None)
    with pytest.raises(TypeError, match="positional"):
        GridAttention(8, "averaged", 2)


@pytest.mark.unchecked("arguments of other types reach the module")
@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("averaged", 8), {}, "got 'averaged' and 8; fix: GridAttention"),
        ((8.0, "averaged"), {}, "got 8.0 and 'averaged'; fix: GridAttention"),
        ((8, "averaged"), {"project": True}, 'must be letters of "qkvo"; fix: project="qkvo"'),
    ],
)
def test_arguments_of_another_type(arguments: tuple, options: dict, text: str) -> None:
    with pytest.raises(TypeError) as raised:
        GridAttention(*arguments, **options)
    assert text in str(raised.value)


@pytest.mark.unchecked("arguments of other types reach the module")
def test_a_mask_in_the_place_of_the_context_and_a_context_of_another_dtype() -> None:
    module, grid = GridAttention(8, "averaged"), torch.randn(2, 8, 4, 6)
    with pytest.raises(TypeError, match=r"context .*boolean.*; fix: .*mask"):
        module(grid, torch.ones(2, 4, 6, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"fix: context.to\(grid.dtype\)"):
        module(grid, grid.double())
    with pytest.raises(TypeError, match=r"mask .*boolean.*got ndarray; fix: torch\.as_tensor\(mask\)"):
        module(grid, mask=torch.ones(2, 4, 6, dtype=torch.bool).numpy())
    with pytest.raises(ShapeError, match=r"\(2, 4, 6\): mask.expand\(2, 4, 6\)"):
        module(grid, mask=torch.ones(4, 6, dtype=torch.bool))
    with pytest.raises(TypeError, match="fix: mask > 0, or mask == 0 if it is additive"):
        module(grid, mask=torch.zeros(2, 4, 6))


@pytest.mark.parametrize(
    ("operator", "fix"),
    [
        ("dot", "factorized, which is equal to dot, whose memory grows with the positions"),
        ("softmax", "factorized_gaussian or kronecker_kv, whose memory grows with the positions"),
    ],
)
def test_memory_that_does_not_suffice_has_a_note(monkeypatch: pytest.MonkeyPatch, operator: str, fix: str) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("farfield.nn.attention.attend", full)
    with pytest.raises(RuntimeError) as raised:
        GridAttention(8, operator)(torch.zeros(1, 8, 6))
    assert "36 coefficients for 6 queries" in raised.value.__notes__[0]
    assert f"fix: {fix}" in raised.value.__notes__[0]
