"""Packages of bioimage.io, in an environment that has bioimageio.core: `test_bioimageio.py` runs these tests there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from monai.data import MetaTensor
from monai.networks.nets import UNet
from torch import Tensor, nn

from farfield.cli import main
from farfield.nn import GridAttention
from farfield.streaming import predict_whole
from farfield.volumes import ImageMetadata, Volume, open_volume, statistics
from helpers.streamed_nets import Hourglass, settled

core, digest = (pytest.importorskip(f"bioimageio.core{each}") for each in ("", ".digest_spec"))
spec, v0_5 = (pytest.importorskip(f"bioimageio.spec{each}") for each in ("", ".model.v0_5"))
integration = pytest.importorskip("farfield.integrations.bioimageio")
open_package, export_package = integration.open_package, integration.export_package
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning")]
AXES = ("batch", "channel", "z", "y", "x")
FLOATS = {"id": "ensure_dtype", "kwargs": {"dtype": "float32"}}
SAMPLE = ["channel", "z", "y", "x"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_AT_ONCE", 999)


class Ordered(nn.Module):
    """A network of other axes: the channels come last, there are no samples, or x comes first."""

    def __init__(self, network: nn.Module, axes: Sequence[str]) -> None:
        super().__init__()
        self.network, self.axes = network, [AXES.index(axis) for axis in axes]

    def forward(self, grid: Tensor) -> Tensor:
        back = [sorted(self.axes).index(axis) for axis in self.axes]
        plain = grid.permute([back.index(place) for place in range(len(back))])
        result = self.network(plain if 0 in self.axes else plain[None])
        return (result if 0 in self.axes else result[0]).permute(back)


class Two(nn.Module):
    """A network of two outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, grid: Tensor) -> tuple[Tensor, Tensor]:
        result = self.network(grid)
        return result, result[:, :1] * 2


def axes_of(names: Sequence[str], channels: Sequence[str], *, is_input: bool) -> list[Any]:
    """Describe axes."""
    described: list[Any] = []
    for name in names:
        if name == "batch":
            described.append(v0_5.BatchAxis())
        elif name == "channel":
            described.append(v0_5.ChannelAxis(channel_names=[v0_5.Identifier(each) for each in channels]))
        elif is_input:
            size = v0_5.ParameterizedSize(min=16, step=2)
            described.append(v0_5.SpaceInputAxis(id=v0_5.AxisId(name), size=size))
        else:
            size = v0_5.SizeReference(tensor_id=v0_5.TensorId("raw"), axis_id=v0_5.AxisId(name))
            described.append(v0_5.SpaceOutputAxis(id=v0_5.AxisId(name), size=size))
    return described


def write_package(
    folder: Path,
    *,
    before: Sequence[Any] = (FLOATS,),
    after: Sequence[Any] = (),
    axes: Sequence[str] = AXES,
    weights: str = "torchscript",
    outputs: int = 1,
) -> Path:
    """Write a package of MONAI's UNet with the test outputs of bioimageio.core's own prediction."""
    torch.manual_seed(0)
    own = UNet(3, 1, 2, (4, 8), (2,), norm="instance").eval()
    network = own if tuple(axes) == AXES else Ordered(own, axes)
    network = Two(own).eval() if outputs == 2 else network
    numbers = np.random.default_rng(0).gamma(2, 300, (1, 1, 24, 20, 16)).clip(0, 60000).astype("uint16")
    index = tuple(slice(None) if axis in axes else 0 for axis in AXES)
    order = [axis for axis in AXES if axis in axes]
    given = numbers[index].transpose([order.index(axis) for axis in axes])
    folder.mkdir(parents=True)
    np.save(folder / "raw.npy", given)
    (folder / "README.md").write_text("# Validation\n")
    if weights == "torchscript":
        torch.jit.trace(network, torch.from_numpy(given).float(), check_trace=False).save(folder / "weights.pt")
        entry = {"torchscript": {"source": folder / "weights.pt", "pytorch_version": "2.14"}}
    else:
        torch.save(own.state_dict(), folder / "weights.pt")
        kwargs = {
            "spatial_dims": 3,
            "in_channels": 1,
            "out_channels": 2,
            "channels": [4, 8],
            "strides": [2],
            "norm": "instance",
        }
        architecture = {"import_from": "monai.networks.nets", "callable": "UNet", "kwargs": kwargs}
        if weights == "file":
            (folder / "net.py").write_text(
                "from pathlib import Path\nfrom monai.networks.nets import UNet\n"
                f"Path({str(folder / 'ran')!r}).touch()\nclass Net(UNet):\n    pass\n"
            )
            architecture = {"source": folder / "net.py", "callable": "Net", "kwargs": kwargs}
        source = {"source": folder / "weights.pt", "pytorch_version": "2.14", "architecture": architecture}
        entry = {"pytorch_state_dict": source}

    def describe(results: Sequence[np.ndarray]) -> Any:
        described = []
        for number, result in enumerate(results):
            np.save(folder / f"output{number}.npy", result)
            channels = ["p", "q"][: result.shape[list(axes).index("channel")]]
            described.append(
                {
                    "id": f"output{number}",
                    "axes": axes_of(axes, channels, is_input=False),
                    "test_tensor": {"source": folder / f"output{number}.npy"},
                    "postprocessing": list(after),
                }
            )
        tensor = {"id": "raw", "axes": axes_of(axes, ["a"], is_input=True), "data": {"type": "uint16"}}
        tensor |= {"test_tensor": {"source": folder / "raw.npy"}, "preprocessing": list(before)}
        return v0_5.ModelDescr(
            name="other",
            description="a UNet of MONAI",
            documentation={"source": folder / "README.md"},
            inputs=[v0_5.InputTensorDescr(**tensor)],
            outputs=[v0_5.OutputTensorDescr(**each) for each in described],
            weights=v0_5.WeightsDescr(**entry),
        )

    doubled = np.concatenate([given, given], list(axes).index("channel")).astype("float32")
    description = describe([doubled, given.astype("float32")][:outputs])
    with core.create_prediction_pipeline(description, devices=["cpu"]) as pipeline:
        made = pipeline.predict_sample_without_blocking(
            digest.get_test_input_sample(description), skip_input_padding=True, skip_output_cropping=True
        )
    description = describe([each.to_numpy() for each in made.members.values()])
    (folder / "ran").unlink(missing_ok=True)
    return Path(spec.save_bioimageio_package(description, output_path=folder / "package.zip"))


def run(path: Path, volume: Any = None, **options: Any) -> tuple[Any, list[np.ndarray]]:
    """Return what a package predicts of its test, in tiles, and the test's output; both in the order of `AXES`."""
    package = open_package(path, **options)
    [given] = [each.data for each in digest.get_test_input_sample(package.description).members.values()]
    expected = [each.data for each in digest.get_test_output_sample(package.description).members.values()]
    ordered = [each.transpose(*(axis for axis in AXES if axis in each.dims)).to_numpy() for each in (given, *expected)]
    prepared = package.preprocess(ordered[0] if volume is None else volume)
    return predict_whole(package.network, prepared, tile=8, reduce=package.postprocess, quiet=True), ordered[1:]


STEPS: dict[str, tuple[list[Any], list[Any]]] = {
    "of the sample": ([{"id": "zero_mean_unit_variance", "kwargs": {"axes": SAMPLE}}, FLOATS], [{"id": "sigmoid"}]),
    "of all": (
        [{"id": "zero_mean_unit_variance", "kwargs": {"axes": None}}, FLOATS],
        [{"id": "softmax", "kwargs": {"axis": "channel"}}],
    ),
    "of each plane": ([{"id": "zero_mean_unit_variance", "kwargs": {"axes": ["y", "x"]}}, FLOATS], []),
    "percentiles": (
        [
            {"id": "scale_range", "kwargs": {"axes": SAMPLE, "min_percentile": 1, "max_percentile": 99.8}},
            {"id": "clip", "kwargs": {"min": 0.0, "max": 1.0}},
            FLOATS,
        ],
        [
            {"id": "scale_linear", "kwargs": {"gain": 2.0, "offset": 0.5}},
            {"id": "binarize", "kwargs": {"threshold": 0.5}},
            {"id": "ensure_dtype", "kwargs": {"dtype": "uint8"}},
        ],
    ),
    "percentiles of all": ([{"id": "scale_range", "kwargs": {"axes": None}}, FLOATS], []),
    "clipped at percentiles": (
        [
            {"id": "clip", "kwargs": {"axes": SAMPLE, "min_percentile": 5, "max_percentile": 95}},
            {"id": "scale_linear", "kwargs": {"gain": 0.001, "offset": -1.0}},
            FLOATS,
        ],
        [{"id": "clip", "kwargs": {"min": -0.5, "max": 0.5}}],
    ),
    "fixed": (
        [{"id": "fixed_zero_mean_unit_variance", "kwargs": {"mean": 500.0, "std": 30.0}}, FLOATS],
        [
            {"id": "scale_linear", "kwargs": {"axis": "channel", "gain": [1.0, 2.0], "offset": [0.0, 1.0]}},
            {
                "id": "fixed_zero_mean_unit_variance",
                "kwargs": {"axis": "channel", "mean": [1.0, 2.0], "std": [0.5, 1.0]},
            },
        ],
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_before_and_after_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    path = write_package(tmp_path / "own", before=STEPS[name][0], after=STEPS[name][1])
    found, [want] = run(path)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    stack = np.load(tmp_path / "own" / "raw.npy")[0, 0]
    for volume in (stack, Volume(stack, ImageMetadata("ZYX"))):
        np.testing.assert_allclose(run(path, volume)[0], want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "axes", [("batch", "z", "y", "x", "channel"), ("channel", "z", "y", "x"), ("x", "y", "z", "channel")]
)
def test_other_orders_of_axes(axes: tuple[str, ...], tmp_path: Path) -> None:
    found, [want] = run(write_package(tmp_path / "own", before=STEPS["of the sample"][0], axes=axes))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_several_outputs(tmp_path: Path) -> None:
    found, wanted = run(write_package(tmp_path / "own", outputs=2, after=[{"id": "sigmoid"}]))
    assert list(found) == ["output0", "output1"]
    for each, want in zip(found.values(), wanted, strict=True):
        np.testing.assert_allclose(each, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", ["library", "file"])
def test_the_code_of_an_architecture_runs_if_it_is_trusted(weights: str, tmp_path: Path) -> None:
    path = write_package(tmp_path / "own", weights=weights)
    with pytest.raises(ValueError, match=r"runs code of Python: the architecture, .*UNet|Net.*fix: trust=True"):
        open_package(path)
    assert not (tmp_path / "own" / "ran").exists()
    found, [want] = run(path, trust=True)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_weights_that_changed_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    shutil.unpack_archive(write_package(tmp_path / "own"), folder)
    open_package(folder)
    with (folder / "weights.pt").open("ab") as file:
        file.write(b"0")
    with pytest.raises(ValueError, match=r"(?i)sha-?256"):
        open_package(folder)


@pytest.mark.parametrize(
    ("where", "step", "error"),
    [
        (
            "post",
            "id: zero_mean_unit_variance, kwargs: {axes: [z, y, x]}",
            "output0 is postprocessed by ZeroMeanUnitVariance, .*fix: take the step out",
        ),
        ("post", "id: softmax, kwargs: {axis: x}", "Softmax of output0 is along x, .*fix: bioimageio.core"),
        (
            "pre",
            "id: scale_linear, kwargs: {axis: z, gain: [1, 2], offset: [0, 1]}",
            "ScaleLinear of raw is along z, .*fix: bioimageio.core",
        ),
    ],
)
def test_steps_that_need_the_whole_are_refused(where: str, step: str, error: str, tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    shutil.unpack_archive(write_package(tmp_path / "own"), folder)
    description = folder / "rdf.yaml"
    text = description.read_text(encoding="utf-8")
    steps = f"    {where}processing:\n"
    assert steps in text
    description.write_text(text.replace(steps, f"{steps}      - {{{step}}}\n"), encoding="utf-8")
    with pytest.raises(ValueError, match=f"open_package: {error}"):
        open_package(folder)


@pytest.mark.parametrize("name", ["rdf.yaml", "a.tif", "a.zip", "folder"])
def test_what_is_no_package_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"a: [1,\n b: }" if name == "rdf.yaml" else bytes(range(128, 256)))
    with pytest.raises(ValueError, match=rf'open_package: ".*{name}" is no valid package .*(?s:.*); fix: the folder'):
        open_package(path)
    if name in ("rdf.yaml", "a.zip"):  # which its name makes one
        np.save(tmp_path / "b.npy", np.zeros((8, 8)))
        with pytest.raises(SystemExit):
            main(["predict", str(path), str(tmp_path / "b.npy"), str(tmp_path / "c.tif")])
        assert f'{name}" is no valid package' in capsys.readouterr().err


def test_tensors_are_volumes(tmp_path: Path) -> None:
    package = open_package(write_package(tmp_path / "own", before=STEPS["percentiles"][0]))
    numbers = np.load(tmp_path / "own" / "raw.npy")
    plain, bfloat16 = torch.from_numpy(numbers.astype("float32")), torch.from_numpy(numbers // 1024 * 256).bfloat16()
    monai = MetaTensor(plain[0], affine=torch.eye(4))
    for tensor in (plain, plain.clone().requires_grad_(), bfloat16, monai, Volume(plain[0, 0], ImageMetadata("ZYX"))):
        prepared = package.preprocess(tensor)
        array = tensor.array if isinstance(tensor, Volume) else tensor
        want = package.preprocess(array.detach().float().numpy())[:]
        np.testing.assert_allclose(np.asarray(prepared), want, rtol=1e-6)
        result = predict_whole(package.network, prepared, tile=8, reduce=package.postprocess, quiet=True)
        assert isinstance(result, Tensor)
    for given, fix in ([[1.0, 2.0]], "numpy.asarray"), ("a.tif", r"farfield.volumes.open_volume\(path\)"):
        with pytest.raises(TypeError, match=rf"Package.preprocess: .*volume .*array, .*fix: .*{fix}"):
            package.preprocess(given)


@pytest.mark.parametrize("dtype", ["?", ">u2", ">f4"])
def test_booleans_and_other_byte_orders(dtype: str, tmp_path: Path) -> None:
    package = open_package(write_package(tmp_path / "own", before=STEPS["percentiles"][0]))
    numbers = np.load(tmp_path / "own" / "raw.npy")
    numbers = numbers > 600 if dtype == "?" else numbers.astype(dtype)
    found = package.preprocess(numbers)[:]
    np.testing.assert_allclose(found, package.preprocess(numbers.astype("float32"))[:], rtol=1e-6)


def test_a_description_of_the_format_0_4(tmp_path: Path) -> None:
    package = open_package(write_package(tmp_path / "own"))
    network = package.network
    numbers = np.random.default_rng(1).random((1, 1, 24, 20, 16), "float32") * 9
    folder = tmp_path / "older"
    folder.mkdir()
    shutil.unpack_archive(tmp_path / "own" / "package.zip", tmp_path / "unpacked")
    shutil.copy(tmp_path / "unpacked" / "weights.pt", folder)
    (folder / "README.md").write_text("# Validation\n")
    np.save(folder / "input.npy", numbers)
    scaled = (numbers - numbers.mean(dtype=float)) / (numbers.std(dtype=float) + 1e-6)
    with torch.no_grad():
        np.save(folder / "output.npy", network(torch.from_numpy(scaled.astype("float32"))).sigmoid().numpy())
    tifffile.imwrite(folder / "cover.tif", np.zeros((8, 8), "uint8"))
    (folder / "rdf.yaml").write_text(OLDER)
    found, [want] = run(folder / "rdf.yaml")
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


OLDER = """
format_version: 0.4.10
type: model
name: older
description: a UNet in the older format
authors: [{name: Somebody}]
cite: [{text: nothing, doi: 10.1145/3394486.3403065}]
license: MIT
documentation: README.md
covers: [cover.tif]
tags: [unet]
timestamp: "2024-01-01T00:00:00"
inputs:
- name: raw
  axes: bczyx
  data_type: float32
  data_range: [-.inf, .inf]
  shape: {min: [1, 1, 16, 16, 16], step: [0, 0, 2, 2, 2]}
  preprocessing:
  - name: zero_mean_unit_variance
    kwargs: {mode: per_sample, axes: czyx}
outputs:
- name: probability
  axes: bczyx
  data_type: float32
  data_range: [-.inf, .inf]
  shape: {reference_tensor: raw, scale: [1, 1, 1, 1, 1], offset: [0, 0.5, 0, 0, 0]}
  postprocessing:
  - name: sigmoid
test_inputs: [input.npy]
test_outputs: [output.npy]
weights:
  torchscript: {source: weights.pt, pytorch_version: "2.14"}
"""


def test_the_command_runs_out_of_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_package(tmp_path / "own", before=STEPS["percentiles"][0], weights="library")
    described = {"axes": "ZYX", "spacing": 0.5, "unit": "um"}
    tifffile.imwrite("stack.tif", np.load("own/raw.npy")[0, 0], imagej=True, resolution=(10, 10), metadata=described)
    words = [
        "predict",
        "--bioimageio",
        str(path),
        "--input",
        "stack.tif",
        "--output",
        "result.ome.zarr",
        "--tile.size",
        "8",
    ]
    with pytest.raises(SystemExit):
        main(words)
    assert "fix: --trust, if you trust those who made it" in capfd.readouterr().err
    main([*words, "--trust", "--tile.memory", "1GB"])
    result = open_volume("result.ome.zarr")
    want = digest.get_test_output_sample(spec.load_model_description(path)).members["output0"].to_numpy()[0]
    np.testing.assert_allclose(result[:], want, rtol=1e-4, atol=1e-5)
    assert result.metadata.spacing == pytest.approx({"Z": 0.5, "Y": 0.1, "X": 0.1})
    with pytest.raises(SystemExit):
        main([*words, "--trust"])
    assert "fix: another path, or --overwrite." in capfd.readouterr().err
    main([*words, "--trust", "--overwrite"])


# ---- written packages ------------------------------------------------------------------------------------------------
def attentive(operator: str, dims: int = 2) -> nn.Module:
    """Return a network with attention and a norm."""
    convolution = nn.Conv2d if dims == 2 else nn.Conv3d
    norm = nn.InstanceNorm2d(8) if dims == 2 else nn.InstanceNorm3d(8)
    attention = GridAttention(8, operator, heads=2, project="vo")
    return nn.Sequential(convolution(1, 8, 3, padding=1, stride=dims - 1), norm, attention, convolution(8, 2, 1)).eval()


WRITTEN = {
    "siamese in float64": (lambda: attentive("siamese").double(), (1, 1, 32, 40), {}),
    "siamese": (lambda: attentive("siamese"), (1, 1, 32, 40), {"onnx": True}),
    "factorized_gaussian": (lambda: attentive("factorized_gaussian"), (1, 1, 32, 40), {}),
    "kronecker_qkv in 3-D": (lambda: attentive("kronecker_qkv", 3), (1, 1, 16, 16, 16), {"step": 2}),
    "a U-Net": (lambda: settled(Hourglass("siamese", 3)), (1, 1, 8, 16, 16), {"step": 4}),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_written_package_passes_without_farfield(name: str, tmp_path: Path) -> None:
    build, shape, options = WRITTEN[name]
    network = build()
    example = torch.rand(shape, dtype=next(network.parameters()).dtype)
    before = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    metadata = {
        "authors": [{"name": "Ada Lovelace"}],
        "license": "MIT",
        "cite": [{"text": "us", "doi": "10.1145/3394486.3403065"}],
    }
    path = tmp_path / ("package.zip" if len(shape) == 4 else "package")
    assert export_package(network, path, example, name=name, metadata=metadata, **options) == path
    assert all(torch.equal(tensor, before[key]) for key, tensor in network.state_dict().items())
    # An environment in which farfield cannot be imported.
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text("import sys\nsys.modules['farfield'] = None\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "without")}
    alone = subprocess.run([sys.executable, "-c", "import farfield"], env=environment, check=False, capture_output=True)
    assert b"ModuleNotFoundError" in alone.stderr
    words = [sys.executable, "-m", "bioimageio.core", "test", str(path)]
    done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Reproduce test outputs" in done.stdout + done.stderr
    found, [want] = run(path)
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())


def test_traces_that_fix_a_size_are_refused(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 2, 3, padding=1)

        def forward(self, grid: Tensor) -> Tensor:
            return self.first(grid) / float(grid.shape[-1])

    with pytest.raises(
        ValueError, match=r"export_package: the trace of Fixed differs .* has fixed the size or the batch"
    ):
        export_package(Fixed().eval(), tmp_path / "fixed.zip", torch.rand(1, 1, 16, 16), name="Fixed")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    network, example = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Dropout(0.5)).eval(), torch.rand(1, 1, 16, 16)

    def write(path: str = "net.zip", example: Tensor = example, **metadata: Any) -> Path:
        return export_package(network, tmp_path / path, example, name="Nuclei", metadata=metadata)

    with pytest.raises(FileNotFoundError, match=r"export_package: there is no folder .*none; fix: .*mkdir"):
        write("none/net.zip")
    for field in ("name", "inputs", "outputs", "weights"):
        with pytest.raises(ValueError, match=rf"metadata has {field}, .*fix: metadata without it"):
            write(**{field: "Other"})
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(TypeError, match=rf"is of {dtype}, .*; fix: copy.deepcopy\(model\).float\(\)"):
            write(example=example.to(dtype))
    network[1].train()
    with pytest.raises(ValueError, match=r"Dropout at \"1\" is in training; fix: model.eval"):
        write()
    network.train()
    with pytest.raises(ValueError, match=r": Sequential is in training; fix: model.eval"):
        write()
    assert list(tmp_path.iterdir()) == []
    network.eval()
    write()
