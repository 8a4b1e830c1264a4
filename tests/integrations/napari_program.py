"""Drive the widget of napari as a user does, in an environment that has napari; test_napari.py runs it.

python napari_program.py SCENARIO FOLDER [FOLDER FOR SCREENSHOTS]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import zarr
from napari.components import ViewerModel
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QApplication
from torch import nn

from farfield.integrations.napari import widget as napari_widget
from farfield.integrations.napari.widget import PredictVolume
from farfield.streaming import predict_whole
from farfield.volumes import ImageMetadata, Volume
from helpers.streamed_nets import Hourglass, NearSighted

APPLICATION = QApplication.instance() or QApplication([])
SHAPE = (16, 96, 80)
SPACED = ImageMetadata("ZYX", {"Z": 2.0, "Y": 0.5, "X": 0.5}, dict.fromkeys("ZYX", "micrometer"))


def wait(condition: Callable[[], Any], seconds: float = 120) -> None:
    """Let Qt work until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        APPLICATION.processEvents()
        time.sleep(0.002)
        assert time.monotonic() < end, "waited in vain"


def press(widget: PredictVolume, name: str, until_idle: bool = True) -> None:
    button = widget.buttons[name].native
    assert button.isEnabled(), f"{name} is disabled: {widget.message}"
    button.click()
    if until_idle:
        wait(lambda: not widget.is_busy)


class RecordedProgress(napari_widget.progress):
    """napari's bar, whose places are recorded."""

    places: ClassVar[list[int]] = []

    def update(self, steps: int = 1) -> None:
        super().update(steps)
        self.places.append(self.n)


napari_widget.progress = RecordedProgress


def save_network(path: Path, row: str | None = "siamese") -> nn.Module:
    """Save a network with attention, or of convolutions alone, as TorchScript; return what is read from the file."""
    torch.manual_seed(0)
    network = NearSighted() if row is None else Hourglass(row, 3)
    torch.jit.trace(network.eval(), torch.zeros(1, 1, 8, 16, 16)).save(path)
    return torch.jit.load(path)


def predict(network: nn.Module, volume: Any, tile: Any) -> np.ndarray:
    return predict_whole(network, volume, tile=tile, pad="reflect", quiet=True)


def save_stack(path: Path) -> np.ndarray:
    stack = np.random.default_rng(0).poisson(40, SHAPE).astype(np.uint16)
    array = zarr.create_array(path, shape=SHAPE, chunks=(8, 32, 32), dtype="uint16")
    array[:] = stack
    return stack


def fill(widget: PredictVolume, folder: Path, **fields: Any) -> None:
    """Open the stack by its path and fill the fields."""
    given = {"kind": "TorchScript file", "model": str(folder / "run"), "output": str(folder / "out.zarr")}
    given |= {"tile": "16, 32, 32"} | fields
    for name, value in given.items():
        widget.fields[name].value = value
    if not len(widget.viewer.layers):
        widget.file.value = folder / "in.zarr"
        wait(lambda: not widget.is_busy)


def cancel_and_resume(folder: Path, viewer: Any) -> None:
    """Plan, start, cancel in the middle, press Resume: the file has the bits of predict_whole."""
    network, stack = save_network(folder / "run"), save_stack(folder / "in.zarr")
    widget = PredictVolume(viewer)
    fill(widget, folder)
    assert not widget.buttons["Start"].enabled
    press(widget, "Plan")
    assert "pass 2 of " in widget.text.value, widget.message
    assert "9 tiles" in widget.text.value
    assert widget.buttons["Start"].text == "Start"

    places = RecordedProgress.places
    ticks: list[float] = []
    timer = QTimer()
    timer.timeout.connect(lambda: ticks.append(time.monotonic()))
    timer.start(5)
    press(widget, "Start", until_idle=False)
    assert widget.buttons["Cancel"].enabled
    assert not widget.buttons["Plan"].enabled
    wait(lambda: len(places) > 4)
    press(widget, "Cancel")
    timer.stop()
    # Qt went on while tiles were predicted.
    assert len(ticks) > 4, ticks
    assert widget.message.startswith("Stopped."), widget.message
    stopped = places[-1]
    assert 0 < stopped < 1000
    assert not (folder / "out.zarr").exists()
    assert widget.buttons["Start"].text == "Resume"

    # As after napari was started again: another widget, the same fields.
    again = PredictVolume(viewer)
    fill(again, folder)
    press(again, "Plan")
    assert again.buttons["Start"].text == "Resume"
    assert "unfinished" in again.text.value
    places.clear()
    press(again, "Start")
    assert again.message == "Done: out.zarr.", again.message
    assert places[0] > stopped
    assert places[-1] == 1000
    layer = viewer.layers["out.zarr"]
    assert isinstance(layer.data, Volume)
    assert isinstance(layer.data.array, zarr.Array)
    assert np.array_equal(zarr.open(folder / "out.zarr")[:], predict(network, stack, (16, 32, 32)))


def larger_than_memory(folder: Path, viewer: Any) -> None:
    """A volume of 16 MiB, of which tiles may take 8."""
    shape = (64, 256, 256)
    array = zarr.create_array(folder / "in.zarr", shape=shape, chunks=(16, 64, 64), dtype="float32")
    array[:] = np.random.default_rng(0).random(shape, "float32")
    network = save_network(folder / "run", None)
    widget = PredictVolume(viewer)
    fill(widget, folder, tile="")
    widget.fields["memory"].value = 8
    press(widget, "Plan")
    assert widget.job is not None, widget.message
    assert len(widget.job.plan.cores) > 8
    assert widget.job.plan.tile_bytes <= 2**23 < array.nbytes
    press(widget, "Start")
    assert widget.message == "Done: out.zarr.", widget.message
    want = predict(network, array, widget.job.plan.tile)
    assert np.array_equal(zarr.open(folder / "out.zarr")[:], want)


def previews(folder: Path, viewer: Any) -> None:
    """The block at the viewer's position, as a layer at its place, with the input's scale and units."""
    save_network(folder / "run", None)
    stack = np.random.default_rng(0).poisson(40, (16, 140, 80)).astype(np.uint16)
    viewer.add_image(stack, name="stack", scale=(2, 0.5, 0.5), units=["um"] * 3, translate=(0, 10, 0))
    viewer.dims.set_point(0, 9 * 2.0)
    viewer.scene.camera.center = (0, 10 + 130 * 0.5, 5 * 0.5)
    widget = PredictVolume(viewer)
    fill(widget, folder, output=str(folder / "out.tif"))
    press(widget, "Plan")
    press(widget, "Preview")
    assert widget.message.startswith("The preview is the whole prediction there, if "), widget.message
    layer = viewer.layers["preview"]
    assert layer.data.shape == (16, 12, 64)
    assert np.allclose(layer.translate, (0, 10 + 128 * 0.5, 0))
    press(widget, "Start")
    done = viewer.layers["out.tif"]
    assert np.allclose(done.translate, (0, 10, 0))
    assert np.allclose(done.scale, (2, 0.5, 0.5))
    assert {str(each) for each in done.units} == {"micrometer"}
    assert np.allclose(done.data[:, 128:140, :64], layer.data[:], rtol=1e-5, atol=1e-4)

    save_network(folder / "attention")
    fill(widget, folder, model=folder / "attention", output=folder / "other.tif")
    press(widget, "Plan")
    press(widget, "Preview")
    assert "preview (this block alone)" in viewer.layers
    assert "will see all positions" in widget.message


def sentences(folder: Path, viewer: Any) -> None:
    """What fails is a sentence in the widget, whose fix works; napari shows no error."""
    from napari.utils.notifications import notification_manager

    notification_manager.records.clear()
    save_network(folder / "run", None)
    save_stack(folder / "in.zarr")
    widget = PredictVolume(viewer)
    press(widget, "Plan")
    assert widget.message == "There is no layer; fix: open a file."
    (folder / "damaged.tif").write_text("nothing")
    widget.file.value = folder / "damaged.tif"
    wait(lambda: not widget.is_busy)
    assert "damaged.tif" in widget.message, widget.message

    def fails(part: str, name: str = "Plan", **fields: Any) -> None:
        fill(widget, folder, **fields)
        press(widget, name)
        assert part in widget.message, widget.message
        assert "fix: " in widget.message, widget.message
        assert "Traceback" not in widget.message

    fails('Tile is "big"', tile="big")
    fails("must end in", output=str(folder / "out.png"))
    fails("No folder", output=str(folder / "a" / "out.zarr"))
    fails("There is no", model=str(folder / "no model"))
    (folder / "net.pt").write_text("nothing")
    fails("is no TorchScript file", model=str(folder / "net.pt"))
    zarr.create_array(folder / "out.zarr", shape=(2,), dtype="float32")
    fails("tick Overwrite")
    widget.fields["overwrite"].value = True  # the fix
    press(widget, "Plan")
    press(widget, "Start")
    assert widget.message == "Done: out.zarr.", widget.message
    fill(widget, folder, tile="", output=str(folder / "new.zarr"))
    press(widget, "Plan")
    press(widget, "Seams")
    assert "Tile" in widget.message, widget.message
    assert "fix: " in widget.message, widget.message
    assert not [each for each in notification_manager.records if each.severity.value == "error"]


def labels(folder: Path, viewer: Any) -> None:
    """A scripted network whose output is labels."""
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3, padding=1)).eval()
    torch.jit.trace(network, torch.zeros(1, 1, 8, 16, 16)).save(folder / "run")
    stack = save_stack(folder / "in.zarr")
    widget = PredictVolume(viewer)
    widget.fields["values"].value = "labels"
    fill(widget, folder)
    press(widget, "Plan")
    assert widget.job is not None, widget.message
    press(widget, "Start")
    layer = viewer.layers["out.zarr"]
    assert type(layer).__name__ == "Labels"
    want = predict_whole(network, stack, tile=(16, 32, 32), reduce="argmax", quiet=True)
    assert np.array_equal(zarr.open(folder / "out.zarr")[:], want)


def changes(folder: Path, viewer: Any) -> None:
    """Fields that change while a thread is at work: no plan of others is kept, no protected file lost."""
    save_network(folder / "run")
    save_stack(folder / "in.zarr")
    zarr.create_array(folder / "kept.zarr", shape=(2,), dtype="float32")[:] = 7
    widget = PredictVolume(viewer)
    fill(widget, folder, output=str(folder / "kept.zarr"), overwrite=True)
    press(widget, "Plan", until_idle=False)
    assert not widget.buttons["Cancel"].enabled  # nothing would end
    widget.fields["overwrite"].value = False
    widget.fields["output"].value = str(folder / "out.zarr")
    assert widget.message == "Planning …"
    wait(lambda: not widget.is_busy)
    assert widget.job is None
    assert not widget.buttons["Start"].enabled
    assert "press Plan again" in widget.message
    press(widget, "Plan")

    press(widget, "Start", until_idle=False)
    wait(lambda: len(RecordedProgress.places) > 2)
    widget.fields["output"].value = str(folder / "other.zarr")
    press(widget, "Cancel")
    assert widget.message.startswith("Stopped. Plan with the fields as they were"), widget.message
    assert widget.buttons["Start"].text == "Start"
    assert not widget.buttons["Start"].enabled
    widget.fields["output"].value = str(folder / "out.zarr")
    press(widget, "Plan")
    assert widget.buttons["Start"].text == "Resume"
    press(widget, "Start")
    assert widget.message == "Done: out.zarr.", widget.message
    assert np.array_equal(zarr.open(folder / "kept.zarr")[:], [7, 7])

    press(widget, "Seams", until_idle=False)
    assert not widget.buttons["Cancel"].enabled
    wait(lambda: not widget.is_busy)

    widget.fields["layer"].value = "in.zarr"
    widget.fields["output"].value = str(folder / "in.zarr")
    widget.fields["overwrite"].value = True
    press(widget, "Plan")
    assert widget.message.startswith("The output and the volume are both in"), widget.message


def layers(folder: Path, viewer: Any) -> None:
    """Layers that are renamed, turned, or have more axes than there are letters."""
    save_network(folder / "run", None)
    stack = np.random.default_rng(0).poisson(40, (8, 140, 80)).astype(np.uint16)
    given = viewer.add_image(stack, name="stack", rotate=(10, 20, 30), scale=(2, 0.5, 0.5), translate=(0, 10, 3))
    given.affine = np.diag([1, 3, 1, 1.0])
    widget = PredictVolume(viewer)
    fill(widget, folder, tile="")
    press(widget, "Plan")
    given.name = "renamed"
    assert widget.fields["layer"].value == "renamed"
    press(widget, "Plan")
    assert widget.job is not None, widget.message
    viewer.scene.camera.center = given.data_to_world((4, 130, 70))
    press(widget, "Preview")
    press(widget, "Start")
    assert np.allclose(viewer.layers["out.zarr"].data_to_world((3, 90, 71)), given.data_to_world((3, 90, 71)))
    block, whole = viewer.layers["preview"], viewer.layers["out.zarr"].data
    start = np.rint(given.world_to_data(block.data_to_world((0, 0, 0)))).astype(int)
    assert tuple(start) == (0, 128, 64)
    assert np.allclose(whole[:, 128:, 64:], block.data[:], rtol=1e-5, atol=1e-4)

    viewer.layers.clear()
    press(widget, "Plan")
    assert widget.message == "There is no layer; fix: open a file."
    viewer.add_image(np.zeros((2, 1, 1, 1, 32, 32)), name="six")
    press(widget, "Plan")
    assert "at most 5" in widget.message, widget.message


def code(folder: Path, viewer: Any) -> None:
    """A class of a file of Python, with weights, whose number above 0.5 is a mask of one channel."""
    start = "def __init__(self):\n        super().__init__(1, 1, 3, padding=1)"
    program = f"from torch import nn\n\n\nclass Net(nn.Conv3d):\n    {start}\n"
    (folder / "net.py").write_text(program)
    torch.manual_seed(0)
    network = nn.Conv3d(1, 1, 3, padding=1)
    torch.save(network.state_dict(), folder / "net.pt")
    stack = save_stack(folder / "in.zarr")
    widget = PredictVolume(viewer)
    assert not widget.fields["class"].native.isVisibleTo(widget.native)
    fill(widget, folder, kind="Python file, class and weights", model=str(folder / "net.py"), values="above 0.5")
    assert widget.fields["class"].native.isVisibleTo(widget.native)
    press(widget, "Plan")
    assert "net.py:Net" in widget.message, widget.message
    widget.fields["class"].value = "Net"
    press(widget, "Plan")
    assert "fix: the file of its weights, Weights" in widget.message, widget.message
    widget.fields["weights"].value = folder / "net.pt"  # the fix
    press(widget, "Plan")
    press(widget, "Start")
    assert type(viewer.layers["out.zarr"]).__name__ == "Labels"
    want = predict_whole(network.eval(), stack, tile=(16, 32, 32), reduce=0.5, quiet=True)
    assert np.array_equal(zarr.open(folder / "out.zarr")[:], want)


SCENARIOS = {
    each.__name__: each
    for each in (cancel_and_resume, larger_than_memory, previews, sentences, labels, code, changes, layers)
}


def through_the_manifest(folder: Path) -> None:
    """The viewer itself: the widget by its manifest, layers drawn, the seams as a dock."""
    import napari
    from npe2 import PluginManager

    import farfield.integrations.napari as package

    PluginManager.instance().register(str(Path(package.__file__).with_name("napari.yaml")), warn_disabled=False)
    save_network(folder / "run")
    save_stack(folder / "in.zarr")
    viewer = napari.Viewer()
    _, widget = viewer.window.add_plugin_dock_widget("farfield", "Predict a whole volume")
    fill(widget, folder)
    press(widget, "Plan")
    press(widget, "Seams")
    assert "Seams" in viewer.window.dock_widgets, widget.message
    assert "predict_whole(network, volume" in widget.message
    press(widget, "Start", until_idle=False)
    viewer.close()  # asks the thread to quit, which ends after a tile


if __name__ == "__main__":
    if sys.argv[1] == "through_the_manifest":
        through_the_manifest(Path(sys.argv[2]))
    else:
        SCENARIOS[sys.argv[1]](Path(sys.argv[2]), ViewerModel())
    print("as it should be")
