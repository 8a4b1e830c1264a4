"""Write a network as a package of bioimage.io that runs without farfield."""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import imageio.v3
import numpy as np
import torch
from bioimageio.spec import save_bioimageio_package, save_bioimageio_package_as_folder
from bioimageio.spec.model import v0_5
from torch import Tensor, nn

from farfield._refusals import door, refusal
from farfield.streaming.arguments import refuse_training


@door("export_package")
def export_package(
    model: nn.Module,
    path: str | Path,
    example: Tensor,
    *,
    name: str,
    step: int = 1,
    metadata: Mapping[str, Any] | None = None,
    onnx: bool = False,
) -> Path:
    """Write a network as a package of bioimage.io: TorchScript and the tensors of its test, for any size.

    The network is traced, and the trace is compared with the network at another size and another batch. It holds
    torch's own operations, so that a program needs no farfield to run it; `bioimageio test` passes on it.

    Args:
        model: Network in eval mode, from one grid to one. It stays as it is.
        path: A path ending in .zip, or a folder that is made.
        example: `(batch, channels, *size)`, of one to three spatial dims: the test's input; random numbers do. Its size
            is the smallest that the package states, so small ones make a fast test.
        name: Name of the model, of five characters or more.
        step: Sizes are those of the example and multiples of this more, in each spatial dim.
        metadata: Fields of the description by bioimage.io's names: authors, license, cite, description, documentation,
            covers, tags, git_repo and others. Authors, license and what to cite are nowhere if they are not given here;
            state them before you share it.
        onnx: Whether the package has ONNX too. It needs the extra export.

    Returns:
        The path.

    Raises:
        FileExistsError: If the path exists.
        FileNotFoundError: If there is no folder that it is to be in.
        TypeError: If the example is of 16 bits, which the format lacks.
        ValueError: If a module of the network is in training mode; if it returns no grid, is not the same at another
            size or batch once it is traced, or its trace has operations that plain torch does not have; if metadata has
            what the network and the other arguments say.

    Example:
        >>> from farfield.nn import GridAttention
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), GridAttention(8, "siamese"), nn.Conv2d(8, 1, 1)).eval()
        >>> metadata = {"authors": [{"name": "Ada Lovelace"}], "license": "MIT"}
        >>> example = torch.rand(1, 1, 64, 64)
        >>> export_package(net, "net.zip", example, name="Nuclei", metadata=metadata)  # doctest: +SKIP
        PosixPath('net.zip')
    """
    target = Path(path)
    if target.exists():
        raise refusal(FileExistsError, f"{target} exists; fix: another path, or remove it.")
    if not target.absolute().parent.is_dir():
        fix = f'Path("{target.parent}").mkdir(parents=True)'
        raise refusal(FileNotFoundError, f"there is no folder {target.parent}; fix: {fix}.")
    own = [field for field in ("name", "inputs", "outputs", "weights") if field in (metadata or {})]
    if own:
        fix = "metadata without it, and name= for the name" if own == ["name"] else "metadata without it"
        raise refusal(ValueError, f"metadata has {own[0]}, which the other arguments say; fix: {fix}.")
    refuse_training(model)
    if example.dtype in (torch.float16, torch.bfloat16):
        fix = "copy.deepcopy(model).float() and example.float()"
        raise refusal(TypeError, f"the example is of {example.dtype}, which bioimage.io's format lacks; fix: {fix}.")
    network, example = copy.deepcopy(model).cpu(), example.detach().cpu()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, about what is compared below
        script = torch.jit.trace(network, example, check_trace=False)
        lengths = [length + step * (1 + axis) for axis, length in enumerate(example.shape[2:])]
        larger = torch.rand(2, example.shape[1], *lengths).to(example.dtype)
        outputs = [_compare(network, script, grid) for grid in (example, larger)]
    foreign = {node.kind() for node in script.inlined_graph.nodes() if node.kind().partition("::")[0] not in _PLAIN}
    if foreign:
        raise refusal(
            ValueError,
            f"the trace of {type(model).__name__} calls {', '.join(sorted(foreign))}, which plain torch does not have; "
            "fix: a network without it.",
        )
    with tempfile.TemporaryDirectory() as folder:
        files = _write_files(Path(folder), network, script, example, outputs[0], onnx=onnx)
        given = {**_describe(name, files), **(metadata or {})}
        sizes = [grid.shape for grid in (example, outputs[0], larger, outputs[1])]
        description = v0_5.ModelDescr(
            name=name,
            inputs=[_describe_input(example, step, files["input"])],
            outputs=[_describe_output(sizes, outputs[0].dtype, files["output"])],
            weights=_describe_weights(files),
            **given,
        )
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".farfield-") as staging:
            staged = Path(staging) / target.name
            if target.suffix == ".zip":
                save_bioimageio_package(description, output_path=staged)
            else:
                save_bioimageio_package_as_folder(description, output_path=staged)
            staged.rename(target)
    return target


_PLAIN = ("aten", "prim")


def _compare(network: nn.Module, script: Any, grid: Tensor) -> Tensor:
    """Return the network's output; refuse a trace that has another."""
    want, name = network(grid), type(network).__name__
    if not isinstance(want, Tensor) or want.dim() != grid.dim():
        dims = grid.dim() - 2
        raise refusal(ValueError, f"{name} returns no grid of {dims} spatial dims; fix: a module around it that does.")
    try:
        found = script(grid)
        difference = float((found - want).abs().max()) if found.shape == want.shape else math.inf
        problem = "" if difference <= 1e-4 * float(want.abs().max()) else f"differs by up to {difference:.2g}"
    except RuntimeError as error:
        problem = f"fails, {str(error).splitlines()[-1]:.100}"
    if problem:
        raise refusal(
            ValueError,
            f"the trace of {name} {problem}, on a grid {tuple(grid.shape)}: it has fixed the size or the batch of the "
            "example; fix: a forward that computes sizes from its input.",
        )
    return want


def _write_files(
    folder: Path, network: nn.Module, script: Any, example: Tensor, output: Tensor, *, onnx: bool
) -> dict[str, Path]:
    """Write weights, tensors, a text and a picture; return where."""
    files = {
        "torchscript": folder / "weights.pt",
        "input": folder / "test_input.npy",
        "output": folder / "test_output.npy",
        "documentation": folder / "README.md",
        "cover": folder / "cover.png",
    }
    torch.jit.save(script, files["torchscript"])
    np.save(files["input"], example.numpy())
    np.save(files["output"], output.numpy())
    files["documentation"].write_text(_README, encoding="utf-8")
    imageio.v3.imwrite(files["cover"], np.concatenate([_draw(example), _draw(output)], 1))
    if onnx:
        files["onnx"] = folder / "weights.onnx"
        shapes = ({0: "batch", **{axis: f"size{axis}" for axis in range(2, example.dim())}},)
        batch = example.expand(2, *example.shape[1:]) if len(example) == 1 else example
        settings: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
        torch.onnx.export(network, (batch,), files["onnx"], dynamic_shapes=shapes, **settings)
    return files


_README = """# Documentation

Exported by farfield. The network reads the whole image; farfield runs it over volumes larger than memory.

## Validation

The test tensors show that a program computes what the network does, not that its results are right for your images:
compare them with a few that you labelled yourself.
"""


def _draw(grid: Tensor) -> np.ndarray:
    """Return the middle plane of the first channel as a square of grey levels."""
    plane = grid[0, 0].float()
    while plane.dim() > 2:
        plane = plane[len(plane) // 2]
    plane = torch.nn.functional.interpolate(plane.reshape(1, 1, -1, plane.shape[-1]), (256, 256))[0, 0]
    low, high = plane.min(), plane.max()
    return ((plane - low) / (high - low).clamp_min(1e-12) * 255).byte().numpy()


# ---- the description -------------------------------------------------------------------------------------------------
def _describe(name: str, files: Mapping[str, Path]) -> dict[str, Any]:
    return {
        "description": f"{name}, exported by farfield.",
        "documentation": {"source": files["documentation"]},
        "covers": [{"source": files["cover"]}],
        "tags": ["farfield", "pytorch"],
    }


def _describe_channels(prefix: str, count: int) -> Any:
    return v0_5.ChannelAxis(channel_names=[v0_5.Identifier(f"{prefix}{index}") for index in range(count)])


def _describe_input(example: Tensor, step: int, file: Path) -> Any:
    axes: list[Any] = [v0_5.BatchAxis(), _describe_channels("channel", example.shape[1])]
    for letter, length in zip("zyx"[-(example.dim() - 2) :], example.shape[2:], strict=True):
        axes.append(v0_5.SpaceInputAxis(id=v0_5.AxisId(letter), size=v0_5.ParameterizedSize(min=length, step=step)))
    data = v0_5.IntervalOrRatioDataDescr(type=str(example.dtype).removeprefix("torch."))
    return v0_5.InputTensorDescr(
        id=v0_5.TensorId("input"), axes=axes, test_tensor=v0_5.FileDescr(source=file), data=data
    )


def _describe_output(sizes: Sequence[torch.Size], dtype: torch.dtype, file: Path) -> Any:
    """Describe the output by the sizes of an input, its output, and another two: by a ratio and an offset."""
    axes: list[Any] = [v0_5.BatchAxis(), _describe_channels("output", sizes[1][1])]
    lengths = zip(*(each[2:] for each in sizes), strict=True)
    for letter, (small, result, larger, larger_result) in zip("zyx"[-(len(sizes[0]) - 2) :], lengths, strict=True):
        ratio = Fraction(larger_result - result, larger - small)
        offset = result - ratio * small
        if ratio <= 0 or offset.denominator > 1:
            raise refusal(
                ValueError,
                f"the output's size along {letter} is {result} of {small} and {larger_result} of {larger}, and a "
                "package states a ratio and an offset; fix: step=, the product of the network's strides.",
            )
        size = v0_5.SizeReference(tensor_id=v0_5.TensorId("input"), axis_id=v0_5.AxisId(letter), offset=int(offset))
        axes.append(v0_5.SpaceOutputAxis(id=v0_5.AxisId(letter), size=size, scale=float(1 / ratio)))
    data = v0_5.IntervalOrRatioDataDescr(type="float64" if dtype == torch.float64 else "float32")
    return v0_5.OutputTensorDescr(
        id=v0_5.TensorId("output"), axes=axes, test_tensor=v0_5.FileDescr(source=file), data=data
    )


def _describe_weights(files: Mapping[str, Path]) -> Any:
    torch_version = v0_5.Version(version("torch").partition("+")[0])
    weights = {"torchscript": v0_5.TorchscriptWeightsDescr(source=files["torchscript"], pytorch_version=torch_version)}
    if "onnx" in files:
        import onnx

        opset = next(each.version for each in onnx.load(files["onnx"]).opset_import if not each.domain)
        weights["onnx"] = v0_5.OnnxWeightsDescr(source=files["onnx"], opset_version=opset, parent="torchscript")
    return v0_5.WeightsDescr(**weights)
