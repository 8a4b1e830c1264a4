"""One ONNX file for every batch and every size: what onnxruntime gives is what torch gives."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime
import pytest
import torch
from diffusers.models.attention_processor import (
    Attention,
    SanaLinearAttnProcessor2_0,
    SanaMultiscaleLinearAttention,
)
from timm.models.efficientvit_mit import LiteMLA
from torch import Tensor, nn

from farfield import insert, pad_grids, replace_attention
from farfield.nn import GridAttention, LocalBranch, attention_for
from farfield.ops import OPERATORS
from helpers.onnx_files import assert_blocks_run_at_any_size, assert_close, assert_runs_at_five_image_sizes, export
from helpers.partly import partly
from helpers.responding import calibrate
from helpers.small_networks import Block, Classifier, convolved

# torch.onnx says on every call which operators of other packages it does not know.
pytestmark = pytest.mark.filterwarnings("ignore")


def attention(row: str) -> GridAttention:
    letters = OPERATORS[row].projections("qkvo")
    return GridAttention(16, row, heads=2, project=letters, inner_channels=8, residual=False).eval()


def products(module: GridAttention) -> GridAttention:
    """The same projections, and products of queries with all keys that nothing is taken off."""
    other = copy.copy(module)
    other.operator = OPERATORS["averaged"]
    return other


SIZES = {
    1: [(1, 1), (3, 8), (2, 53), (1, 784), (5, 2)],
    2: [(1, 1, 1), (3, 8, 10), (2, 7, 13), (1, 28, 28), (5, 2, 31)],
    3: [(1, 1, 1, 1), (3, 4, 8, 10), (2, 7, 3, 5), (1, 9, 9, 9), (5, 2, 1, 31)],
}


# One row of each kind of summary here; the others, and other ranks, take a minute.
QUICK = ("kronecker_qkv", "factorized_gaussian", "siamese")
CASES = [
    pytest.param(row, rank, marks=[] if rank == 2 and row in QUICK else pytest.mark.slow)
    for row in OPERATORS
    for rank in (1, 2, 3)
]


@pytest.mark.long
@pytest.mark.parametrize("row", partly(OPERATORS))
def test_a_batch_of_as_many_samples_as_heads(row: str, tmp_path: Path) -> None:
    """onnxscript (0.7.2) takes the shapes away between products of joined heads where the batch is as large."""
    net, grid = attention(row), torch.randn(2, 16, 3, 4)
    with torch.no_grad():
        for each in net.parameters():
            each.normal_(std=0.5)
    torch.onnx.export(net, (grid,), tmp_path / "net.onnx", dynamo=True, external_data=False, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: grid.numpy()})
    assert_close(torch.from_numpy(found), net(grid), 12)


@pytest.mark.long
@pytest.mark.parametrize(("row", "rank"), CASES)
def test_every_row_at_any_batch_and_size(tmp_path: Path, row: str, rank: int) -> None:
    module = attention(row)
    run = export(module, [torch.randn(2, 16, *(6, 10, 8)[:rank])], ["grid"], tmp_path / "row.onnx")
    for batch, *size in SIZES[rank]:
        grid = torch.randn(batch, 16, *size)
        with torch.no_grad():
            # `inline` takes the mean of the queries' products off: nearly all, where positions are few.
            taken = float(products(module)(grid).norm()) if row == "inline" else 0.0
            assert_close(run(grid), module(grid), grid[0, 0].numel(), taken)


@pytest.mark.slow
@pytest.mark.parametrize("row", OPERATORS)
def test_every_row_with_a_mask(tmp_path: Path, row: str) -> None:
    module = attention(row)
    example = pad_grids([torch.randn(16, 6, 10), torch.randn(16, 9, 4)])
    run = export(module, example, ["grid", "mask"], tmp_path / "masked.onnx")
    for batch, mask in [example, pad_grids([torch.randn(16, side, 17 - side) for side in (3, 11, 1)])]:
        with torch.no_grad():
            expected = module(batch, mask=mask)
        found = run(batch, mask)
        for index, valid in enumerate(mask):
            assert_close(found[index, :, valid], expected[index, :, valid], mask[0].numel())
        hidden = torch.where(mask[:, None], batch, 1e6)
        assert torch.equal(run(hidden, mask).movedim(1, -1)[mask], found.movedim(1, -1)[mask])


@pytest.mark.slow
def test_blocks_at_any_size(tmp_path: Path) -> None:
    blocks = convolved(3, 16, stride=2), Block(16, 16, "kronecker_qkv"), Block(16, 24, "siamese", stride=2)
    net = calibrate(nn.Sequential(*blocks), torch.randn(8, 3, 32, 32))
    assert_blocks_run_at_any_size(net, tmp_path / "blocks.onnx")


def resnet_with_attention() -> nn.Module:
    """Inserted behind a Sequential, where it is the last child, and behind a block, where a hook calls it."""
    from torchvision.models import resnet50

    make = partial(GridAttention, operator="factorized_gaussian", inner_channels=64, project="qkvo", residual=True)
    net = resnet50(weights=None)
    for addition in insert(net, ["layer3", "layer4.0"], make, example=torch.randn(1, 3, 64, 64)).values():
        addition.output.reset_parameters()
    return net


def classifier(row: str) -> nn.Module:
    """One whose scores are no small numbers."""
    net = Classifier(row)
    nn.init.normal_(net.classifier.weight)
    return net


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "kronecker_qkv": (partial(classifier, "kronecker_qkv"), "image"),
    "softmax": (partial(classifier, "softmax"), "image"),
    "averaged": (partial(classifier, "averaged"), "image"),
    "resnet50": (resnet_with_attention, "x"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_at_five_image_sizes(tmp_path: Path, name: str) -> None:
    build, argument = NETWORKS[name]
    net = calibrate(build(), torch.randn(16, 3, 128, 128))
    assert_runs_at_five_image_sizes(net, argument, tmp_path / "net.onnx")


# ---- exporters of others ---------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("row", list(OPERATORS))
def test_the_older_exporter_takes_every_row_within_a_network(tmp_path: Path, row: str) -> None:
    # By itself a module with arguments that have names only is called wrongly by it.
    network, grid = nn.Sequential(attention(row)), torch.randn(2, 16, 5, 6)
    torch.onnx.export(network, (grid,), str(tmp_path / "old.onnx"), dynamo=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "old.onnx"), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: grid.numpy()})[0])
    with torch.no_grad():
        torch.testing.assert_close(found, network(grid))


@pytest.mark.slow
@pytest.mark.parametrize("row", list(OPERATORS))
def test_openvino_converts_every_row(row: str) -> None:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed")
    module, grid = attention(row), torch.randn(2, 16, 5, 6)
    with torch.no_grad():
        want = module(grid)
        models_of_openvino = [
            openvino.convert_model(module, example_input=grid),
            openvino.convert_model(torch.export.export(module, (grid,))),
        ]
    for each in models_of_openvino:
        # Its own default is the fastest format of the processor, such as bfloat16.
        compiled = openvino.compile_model(each, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        torch.testing.assert_close(torch.from_numpy(compiled(grid.numpy())[0]), want)


@pytest.mark.long
@pytest.mark.parametrize(("row", "rank"), [("factorized_gaussian", 2), ("kronecker_kv", 3), ("softmax", 1)])
def test_the_recommended_attention_at_any_size(tmp_path: Path, row: str, rank: int) -> None:
    module = attention_for(16, row).eval()
    module.attention.output.reset_parameters()
    run = export(module, [torch.randn(2, 16, *(6, 10, 8)[:rank])], ["grid"], tmp_path / "normed.onnx")
    for batch, *size in SIZES[rank]:
        grid = torch.randn(batch, 16, *size)
        with torch.no_grad():
            assert_close(run(grid), module(grid), grid[0, 0].numel())


def local_branch() -> LocalBranch:
    return LocalBranch(GridAttention(16, "inline", heads=2, project="qkvo"), 16, 3, 2)


def sana_block() -> nn.Module:
    return SanaMultiscaleLinearAttention(16, 16, residual_connection=True)


@pytest.mark.long
@pytest.mark.parametrize("build", [local_branch, sana_block, lambda: LiteMLA(16, 16, dim=8)])
def test_linear_attention_of_networks_at_any_size(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    module = build().eval()
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3)
    grids, wanted = [torch.randn(batch, 16, *size) for batch, *size in SIZES[2]], []
    if not isinstance(module, LocalBranch):
        with torch.no_grad():
            wanted = [module(grid) for grid in grids]
        replace_attention(module, "linear_relu")
    name = next(iter(inspect.signature(module.forward).parameters))
    run = export(module, [torch.randn(2, 16, 6, 10)], [name], tmp_path / "network.onnx")
    for index, grid in enumerate(grids):
        with torch.no_grad():
            assert_close(run(grid), wanted[index] if wanted else module(grid), grid[0, 0].numel())


@pytest.mark.slow
def test_attention_of_tokens_at_any_length(tmp_path: Path) -> None:
    module = Attention(16, heads=2, dim_head=8, processor=SanaLinearAttnProcessor2_0()).eval()
    sequences = [torch.randn(batch, length, 16) for batch, length in [(1, 1), (3, 8), (2, 53), (1, 784)]]
    with torch.no_grad():
        wanted = [module(tokens) for tokens in sequences]
    replace_attention(module, "linear_relu")
    file = tmp_path / "tokens.onnx"
    torch.onnx.export(
        Tokens(module),
        (torch.randn(2, 6, 16),),
        str(file),
        dynamic_shapes={"tokens": {0: "batch", 1: "length"}},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for tokens, expected in zip(sequences, wanted, strict=True):
        found = torch.from_numpy(session.run(None, {"tokens": tokens.numpy()})[0])
        assert_close(found, expected, tokens.shape[1])


class Tokens(nn.Module):
    """A module of one argument, whose name is known."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        return self.module(tokens)
