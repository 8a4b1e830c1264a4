"""Drive the widget of napari on a real file, with seconds of each step, and take the pictures of docs/guide/napari.md.

    xvfb-run -s "-screen 0 1600x1100x24" python benchmarks/viewer.py flybrain.tif --model runs/care3d \
        --preview runs/plain --tile "32, 64, 64" --pictures docs/guide/napari

It needs the extra napari; the prediction is cancelled at 45 % and resumed. Paths are shown as they are given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch.utils.flop_counter  # noqa: F401  # loads Triton, before the viewer loads Mesa's LLVM: not the other way round
from PIL import Image

import farfield.integrations.napari as package


def main() -> None:
    """Press the buttons of the widget one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("volume", type=Path)
    parser.add_argument("--model", required=True, type=Path, help="a run that is predicted")
    parser.add_argument("--preview", type=Path, help="another run, of which a block is shown first")
    parser.add_argument("--tile", default="", help="as in the widget")
    parser.add_argument("--output", type=Path, default=Path("restored.ome.zarr"))
    parser.add_argument("--limits", type=float, nargs=2, default=(95, 330), help="grey levels that are black and white")
    parser.add_argument("--pictures", type=Path, default=Path())
    arguments = parser.parse_args()
    import napari
    from npe2 import PluginManager
    from qtpy.QtWidgets import QApplication

    PluginManager.instance().register(str(Path(package.__file__).with_name("napari.yaml")), warn_disabled=False)
    viewer = napari.Viewer()
    window = viewer.window._qt_window
    window.resize(1280, 800)
    _, widget = viewer.window.add_plugin_dock_widget("farfield", "Predict a whole volume")

    def wait(condition: Callable[[], bool]) -> None:
        while not condition():
            QApplication.processEvents()
            time.sleep(0.005)

    def take(name: str) -> None:
        for layer in viewer.layers:
            layer.contrast_limits_range = layer.contrast_limits = arguments.limits
        end = time.monotonic() + 1
        wait(lambda: time.monotonic() > end)
        path = arguments.pictures / f"{name}.png"
        window.grab().save(str(path))
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)

    def press(name: str, until: Callable[[], bool] = lambda: not widget.is_busy) -> None:
        begun = time.monotonic()
        widget.buttons[name].native.click()
        wait(until)
        print(f"{name}: {time.monotonic() - begun:.1f} s; {widget.message.splitlines()[0]}", flush=True)

    # Of a field the line, which keeps a path as it is given.
    widget.file.line_edit.value = str(arguments.volume)
    wait(lambda: not widget.is_busy)
    fields = widget.fields
    fields["model"].line_edit.value = str(arguments.preview or arguments.model)
    fields["tile"].value, fields["output"].line_edit.value = arguments.tile, str(arguments.output)
    press("Plan")
    press("Preview")
    take("preview")
    viewer.layers[-1].visible = False
    fields["model"].line_edit.value = str(arguments.model)
    press("Plan")
    take("plan")
    viewer.window._status_bar._toggle_activity_dock(True)
    press("Start", lambda: widget._bar is not None and widget._bar.n >= 450)
    take("progress")
    press("Cancel")
    press("Start")
    viewer.window._status_bar._toggle_activity_dock(False)
    take("done")
    press("Seams")
    take("seams")
    viewer.close()


if __name__ == "__main__":
    main()
