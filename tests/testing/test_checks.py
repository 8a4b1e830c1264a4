"""The checks for users pass what is right and report what is wrong."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import subprocess
import sys
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from farfield import ops, streaming
from farfield.ops import Operator
from farfield.testing import check_operator, check_tiles, faults, loops, reference
from farfield.testing.predictions import TILES, Key, Predictions, check_predictions
from farfield.volumes.file_formats import FORMATS, Format, make_npy, open_npy


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ops.OPERATORS)
def test_the_operators_of_the_table_pass(name: str, heads: int) -> None:
    check_operator(name, getattr(reference, name), heads=heads)


def other_basis(basis: Callable[[Tensor, Tensor], Tensor], name: str = "averaged") -> Operator:
    """An operator of the table with another basis."""
    return dataclasses.replace(ops.OPERATORS[name], basis=lambda key, valid: (basis(key, valid), None))


def mean(query: np.ndarray, key: np.ndarray, value: np.ndarray, *, heads: int, mask: np.ndarray | None) -> np.ndarray:
    """Loops of uniform attention."""
    valid = np.ones((len(key), *key.shape[2:]), bool) if mask is None else mask
    response = np.zeros((len(query), value.shape[1], *query.shape[2:]))
    for sample in range(len(query)):
        if valid[sample].any():
            response[sample].T[:] = value[sample][:, valid[sample]].mean(axis=1)
    return response


def without_mask(query: np.ndarray, key: np.ndarray, value: np.ndarray, **_: object) -> np.ndarray:
    """Loops that ignore the mask."""
    return mean(query, key, value, heads=1, mask=None)


def uniform(basis: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    """Uniform attention: one slot."""
    return Operator(
        coefficients=lambda query, summary: torch.ones_like(query[:, :, :1]),
        basis=lambda key, valid: (basis(key[:, :, :1], valid), None),
    )


def test_an_operator_of_ones_own_passes() -> None:
    check_operator(uniform(lambda key, valid: torch.ones_like(key) * valid), mean)


@pytest.mark.parametrize(
    ("operator", "loops", "text"),
    [
        (
            other_basis(lambda key, valid: 1.001 * key * valid),
            reference.averaged,
            "the response differs from the loops",
        ),
        (other_basis(lambda key, valid: key.detach() * valid), reference.averaged, "gradients"),
        (uniform(lambda key, valid: torch.ones_like(key) * valid), without_mask, "with a mask"),
    ],
    ids=["response", "gradient", "mask"],
)
def test_a_wrong_operator_is_reported(operator: Operator, loops: Callable[..., np.ndarray], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_operator(operator, loops)


def test_an_operator_whose_tiles_do_not_merge_is_reported() -> None:
    # A softmax over the positions of a tile alone: weights without a peak cannot be merged.
    def softmax_of_tile(key: Tensor, valid: Tensor) -> tuple[Tensor, None]:
        return torch.softmax(key.masked_fill(valid == 0, -torch.inf), -1).nan_to_num(), None

    operator = dataclasses.replace(ops.OPERATORS["factorized_gaussian"], basis=softmax_of_tile, per=lambda *_: 1)
    with pytest.raises(AssertionError, match="to tiles differs"):
        check_operator(operator, reference.factorized_gaussian)


def test_it_leaves_the_random_numbers_of_the_caller() -> None:
    state = torch.get_rng_state()
    check_operator("averaged", reference.averaged)
    assert torch.equal(torch.get_rng_state(), state)


def test_tiles_of_a_network_pass() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4)).eval()
    check_tiles(net, 1 + torch.rand(1, 1, 23, 17), (7, 5))
    assert next(net.parameters()).dtype == torch.float32


def test_tiles_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, volume: Tensor, **_: object) -> Tensor:
        result = model(volume).detach().clone()
        result[0, 0, 3, 2] += 1e-3
        return result

    net, volume = nn.Conv2d(1, 1, 3, padding=1).eval(), torch.rand(1, 1, 6, 5)
    monkeypatch.setattr(streaming, "predict_whole", wrong)
    with pytest.raises(AssertionError, match=r"1\.0e-03 at \(0, 0, 3, 2\)"):
        check_tiles(net, volume, 4)
    monkeypatch.setattr(streaming, "predict_whole", lambda model, volume, **_: model(volume).detach()[..., :-1])
    with pytest.raises(AssertionError, match=r"\(1, 1, 6, 4\), of the whole \(1, 1, 6, 5\)"):
        check_tiles(net, volume, 4)


@pytest.mark.parametrize("module", [reference, loops], ids=["reference", "loops"])
def test_the_loops_import_nothing_of_the_library(module: types.ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    names = (froms | plain) - {loops.__name__}
    assert {name.split(".")[0] for name in names} == {"__future__", "collections", "numpy"}


@pytest.mark.long
def test_an_operator_is_checked_without_any_extra() -> None:
    absent = ["pytest", "hypothesis", "xxhash", "zarr", "tifffile", "tqdm"]
    program = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    program += "from farfield.testing import check_operator, reference; check_operator('dot', reference.dot)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture
def own_format(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[Predictions]]:
    """Register a file format."""
    if faults.problem() is not None:
        pytest.skip(faults.problem())

    class OwnFormat(Predictions):
        suffixes = (".own",)

    def register(**parts: object) -> type[Predictions]:
        monkeypatch.setitem(FORMATS, ".own", Format(make_npy, open_npy, mapped=True)._replace(**parts))
        return OwnFormat

    return register


def test_a_format_of_ones_own_passes(own_format: Callable[..., type[Predictions]]) -> None:
    check_predictions(own_format(), programs=3, steps=3)


def test_a_format_that_writes_beside_its_path_is_reported(own_format: Callable[..., type[Predictions]]) -> None:
    def make(path: object, spec: object) -> object:
        (path.parent.parent / "beside.txt").write_text("x")
        return make_npy(path, spec)

    state = own_format(make=make)()
    state.choose_a_format(".own")
    try:
        with pytest.raises(AssertionError, match="left"):
            state.call(key=Key(0, TILES[0]), overwrite=False)
    finally:
        shutil.rmtree(state.folder)  # `teardown` would find the file again


def test_without_faults_the_machine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "problem", lambda: "no filter here")
    with pytest.raises(OSError, match="check_predictions: no filter here; fix: "):
        check_predictions(programs=1)
