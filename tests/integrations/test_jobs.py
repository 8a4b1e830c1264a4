"""A trained model on a volume, as the widget and the notebook run it: planned, tried out, stopped, resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from torch import nn

from farfield.integrations.jobs import Job
from farfield.integrations.trained_models import OpenedModel, kinds, open_model
from farfield.streaming import Tiles, predict_whole
from farfield.volumes import ImageMetadata, Volume, open_volume
from helpers.jobs import SHAPE, SPACED, StopError, make_stack, stop_after
from helpers.streamed_nets import Hourglass, NearSighted, NormUNet, settled


@pytest.fixture
def stack() -> Volume:
    return make_stack()


def plain(network: nn.Module) -> OpenedModel:
    return OpenedModel("a network", lambda volume: (network.eval(), volume))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "norms": lambda: settled(NormUNet(3, 2)),
    "attention": lambda: settled(Hourglass("siamese", 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_it_gives_what_predict_whole_gives_to_the_bit(stack: Volume, tmp_path: Path, name: str) -> None:
    network = NETWORKS[name]()
    job = Job(plain(network), stack, tmp_path / "out.zarr", tile=Tiles((10, 16, 16)))
    assert len(job.plan.cores) == 6  # padded to 10, 34, 30
    result = job.run()
    assert np.array_equal(result[:], predict_whole(network, stack, tile=(10, 16, 16), pad="reflect", quiet=True))
    assert result.metadata.spacing == SPACED.spacing
    assert result.metadata.origin == SPACED.origin
    assert open_volume(tmp_path / "out.zarr").metadata.units == SPACED.units


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_one_that_was_stopped_goes_on_to_the_same_bits(stack: Volume, tmp_path: Path, name: str) -> None:
    network, out = NETWORKS[name](), tmp_path / "out.tif"
    model, options = plain(network), {"tile": Tiles((10, 16, 16))}
    job, shown = Job(model, stack, out, **options), []
    assert not job.is_begun
    with pytest.raises(StopError):
        job.run(stop_after(3, shown))
    assert not out.exists()
    assert job.is_begun
    assert 0 < shown[0] < shown[1] < shown[2] < 1

    again, resumed = Job(model, stack, out, **options), []
    assert again.is_begun
    result = again.run(lambda share, text: resumed.append((share, text)))
    assert resumed[0][0] > shown[2]
    assert resumed[-1] == (1.0, f"pass {len(job.plan.passes)} of {len(job.plan.passes)}")
    assert not again.is_begun
    assert np.array_equal(result[:], predict_whole(network, stack, pad="reflect", quiet=True, **options))


def test_a_volume_on_disk_is_larger_than_its_tiles_may_be(tmp_path: Path) -> None:
    array = zarr.create_array(tmp_path / "in.zarr", shape=(24, 64, 64), chunks=(8, 32, 32), dtype="float32")
    array[:] = np.random.default_rng(0).random(array.shape, "float32")
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.Conv3d(4, 1, 3, padding=1)).eval()
    memory = array.nbytes // 2
    job = Job(plain(net), open_volume(tmp_path / "in.zarr"), tmp_path / "out.zarr", tile=Tiles(memory=memory))
    assert len(job.plan.cores) > 1
    assert job.plan.tile_bytes <= memory
    result = job.run()
    assert np.array_equal(result[:], predict_whole(net, array, tile=job.plan.tile, quiet=True))


def test_its_plan_needs_no_plan_of_the_free_memory_to_go_on(stack: Volume, tmp_path: Path) -> None:
    net, out = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2)), tmp_path / "out.zarr"
    first = Job(plain(net), stack, out, tile=Tiles((4, 16, 16)))
    with pytest.raises(StopError):
        first.run(stop_after(2, []))
    # The largest that memory allows would be the whole.
    assert Job(plain(net), stack, out).plan.tile == first.plan.tile


class Scaled(nn.Module):
    """A network on a volume that its largest number divides."""

    def __init__(self, network: nn.Module, largest: float) -> None:
        super().__init__()
        self.network, self.largest = network, largest

    def forward(self, grid: torch.Tensor) -> torch.Tensor:
        return self.network(grid / self.largest)


def test_a_volume_that_changed_since_the_plan_is_prepared_again(tmp_path: Path) -> None:
    network, numbers = NearSighted(), np.random.default_rng(0).poisson(40, SHAPE).astype(np.uint16)

    def prepare(volume: Volume) -> tuple[nn.Module, Volume]:
        return Scaled(network, float(np.max(volume[:]))).eval(), volume

    volume = Volume(numbers, SPACED)
    job = Job(OpenedModel("a network", prepare), volume, tmp_path / "out.zarr", tile=Tiles(16))
    numbers *= 10
    want = predict_whole(prepare(volume)[0], numbers, tile=16, pad="reflect", quiet=True)
    assert np.array_equal(job.run()[:], want)


def test_the_input_is_refused_as_output_before_anything_runs(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "in.zarr", shape=(30, 27), dtype="float32")[:] = 1
    volume = open_volume(tmp_path / "in.zarr")
    with pytest.raises(ValueError, match=r"Job: the output and the volume are both in .*in\.zarr.*; fix: another path"):
        Job(plain(nn.Conv2d(1, 1, 3, padding=1)), volume, tmp_path / "in.zarr", overwrite=True)
    assert np.array_equal(volume[:], np.ones((30, 27)))


# ---- previews --------------------------------------------------------------------------------------------------------
@pytest.mark.long
@pytest.mark.parametrize("position", [{"Z": 4, "Y": 70, "X": 9}, {"X": 131}, {"Z": 8, "Y": 129, "X": 64}])
def test_a_preview_is_that_part_of_the_prediction(tmp_path: Path, position: dict[str, int]) -> None:
    numbers = np.random.default_rng(0).poisson(40, (9, 130, 132)).astype(np.uint16)
    job = Job(plain(NearSighted()), Volume(numbers, SPACED), tmp_path / "out.zarr")
    (block, layers), whole = job.preview(position), job.run()[:]
    assert layers == []
    known = block.metadata
    starts = [round((known.origin.get(each, 0) - SPACED.origin.get(each, 0)) / known.spacing[each]) for each in "ZYX"]
    assert all(0 <= position.get(letter, 0) - start < 64 for letter, start in zip("ZYX", starts, strict=True))
    place = tuple(slice(start, start + length) for start, length in zip(starts, block.shape, strict=True))
    np.testing.assert_allclose(block[:], whole[place], rtol=1e-5, atol=1e-4)


def test_a_preview_of_one_plane_of_several(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 4, stride=2, padding=1))
    planes = Volume(np.random.default_rng(0).random((5, 300, 40), "float32"), ImageMetadata("ZYX"))
    job = Job(plain(net), planes, tmp_path / "out.zarr")
    (block, _), whole = job.preview({"Z": 3, "Y": 270, "X": 5}), job.run()[:]
    assert whole.shape == (5, 3, 150, 20)
    np.testing.assert_allclose(block[:], whole[3, :, 128:], rtol=1e-5, atol=1e-6)
    assert block.metadata.axes == "CYX"
    # In positions of the volume: windows of four stand in the middle of them.
    assert (block.metadata.origin, block.metadata.spacing) == ({"Y": 256.5, "X": 0.5}, {"Y": 2.0, "X": 2.0})


def test_a_preview_names_the_layers_that_see_the_block_alone(stack: Volume, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2))
    assert Job(plain(net), stack, tmp_path / "out.zarr").preview({})[1] == []  # the block is the whole
    long = Volume(np.random.default_rng(0).random((9, 130, 8), "float32"), SPACED)
    assert Job(plain(net), long, tmp_path / "out.zarr").preview({})[1] == ["1"]


# ---- models ----------------------------------------------------------------------------------------------------------
@pytest.mark.long
def test_a_network_that_takes_multiples_alone_is_padded(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(4), nn.Upsample(scale_factor=4))

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net

        def forward(self, grid: torch.Tensor) -> torch.Tensor:
            return self.inner(grid) + grid

    image = Volume(np.random.default_rng(0).random((30, 27), "float32"), ImageMetadata("YX"))
    job = Job(plain(Sum()), image, tmp_path / "out.zarr")
    assert "(padded)" in str(job.plan)
    assert job.run().shape == (2, 30, 27)


def test_labels(tmp_path: Path) -> None:
    net, image = nn.Conv2d(1, 4, 3, padding=1), Volume(np.ones((30, 27), "float32"), ImageMetadata("YX"))
    assert Job(plain(net), image, tmp_path / "out.zarr", reduce="argmax").run().dtype == np.uint8


def test_a_scripted_network(stack: Volume, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3, padding=1)).eval()
    torch.jit.trace(net, torch.zeros(1, 1, 8, 16, 16)).save(tmp_path / "net.pt")
    model = open_model("TorchScript file", tmp_path / "net.pt")
    job = Job(model, stack, tmp_path / "out.zarr", tile=Tiles((9, 16, 16)), reduce="argmax")
    want = predict_whole(net, stack, tile=(9, 16, 16), reduce="argmax", quiet=True)
    assert np.array_equal(job.run()[:], want)
    assert np.array_equal(job.preview({})[0][:], want)


@pytest.mark.parametrize(
    ("axes", "shape", "preview"),
    [("CZYX", (2, 5, 30, 27), "YX"), ("TYX", (5, 30, 27), "YX"), ("YXC", (30, 27, 3), "YX"), ("YX", (30, 27), "YX")],
)
def test_a_scripted_network_has_the_axes_of_its_operations(
    axes: str, shape: tuple[int, ...], preview: str, tmp_path: Path
) -> None:
    channels = dict(zip(axes, shape, strict=True)).get("C", 1)
    net = nn.Conv2d(channels, 1, 3, padding=1)
    torch.jit.trace(net, torch.zeros(1, channels, 16, 16)).save(tmp_path / "net.pt")
    spacing = {letter: step for letter, step in {"Z": 3.0, "Y": 2.0, "X": 1.5}.items() if letter in axes}
    volume = Volume(np.random.default_rng(0).random(shape, "float32"), ImageMetadata(axes, spacing))
    job = Job(open_model("TorchScript file", tmp_path / "net.pt"), volume, tmp_path / "out.zarr")
    other = Job(plain(net), volume, tmp_path / "other.zarr")
    (block, _), (want, _) = (each.preview({axes[0]: 1, "Y": 9}) for each in (job, other))
    assert block.metadata == want.metadata
    assert block.metadata.axes == preview
    assert np.array_equal(block[:], want[:])
    result, wanted = job.run(), other.run()
    assert result.metadata == wanted.metadata
    assert result.metadata.spacing == spacing
    assert np.array_equal(result[:], wanted[:])


@pytest.mark.parametrize("kind", kinds())
def test_a_model_that_is_not_there(kind: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"open_model: there is no .*nowhere; fix: "):
        open_model(kind, tmp_path / "nowhere")


def test_what_is_no_torchscript(tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_text("nothing")
    with pytest.raises(ValueError, match=r"is no TorchScript file; fix: torch\.jit\.trace"):
        open_model("TorchScript file", tmp_path / "net.pt")
