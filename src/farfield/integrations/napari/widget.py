"""The widget "Predict a whole volume": what its fields say becomes a `Job`, which runs in a thread of its own."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np

from farfield._checks import install_command
from farfield.integrations.jobs import Job
from farfield.integrations.napari.layers import (
    Affine,
    find_affine,
    layer_options,
    parse_tile,
    position_of,
    volume_of,
    word_error,
)
from farfield.integrations.trained_models import OpenedModel, kinds, open_model, open_network
from farfield.streaming import Tiles, find_seams
from farfield.volumes import Volume, open_volume

try:
    from magicgui.widgets import (
        CheckBox,
        ComboBox,
        Container,
        FileEdit,
        Image,
        LineEdit,
        PushButton,
        SpinBox,
        TextEdit,
    )
    from napari.qt.threading import create_worker
    from napari.utils import progress
    from superqt import ensure_main_thread
except ImportError as missing:
    fix = install_command("napari")
    raise ImportError(f"farfield.integrations.napari: {missing.name} is not installed; fix: {fix}") from missing

# What the output holds, as it is chosen -> the argument `reduce`.
_VALUES = {"as the model has them": None, "labels": "argmax", "probabilities": "softmax", "above 0.5": 0.5}
# The kind of model that is code, which runs because the user names it.
_CODE = "Python file, class and weights"
_ROWS = (slice(0, 3), slice(3, 5))
_INVITATION = "Choose a layer, a model and an output, and press Plan."
_STOPPED = "Stopped. Resume goes on from the tiles that are finished."
_STOPPED_AND_CHANGED = (
    "Stopped. Plan with the fields as they were, and Resume, goes on from the tiles that are finished."
)
# The size of the whole may be in the network, as in coordinates: then a block has other numbers.
_ALONE = (
    "The preview is the whole prediction there, if nothing in the network depends on the size or place of the whole."
)
# Steps of the progress bar: the work of a prediction is too large a number for Qt.
_STEPS = 1000


class _Cancelled(Exception):  # noqa: N818  # no error: what the user asked for
    """The prediction ends after a tile."""


class PredictVolume(Container):
    """A widget that predicts a layer or a file of any size by a trained model: planned, tried out, run, resumed.

    Args:
        napari_viewer: The viewer, which napari passes by this name.

    Attributes:
        job: What was planned for the fields as they are; None where they have changed since the plan began.
        is_busy: Whether a thread is at work.
    """

    def __init__(self, napari_viewer: Any) -> None:
        self.viewer, self.is_busy = napari_viewer, False
        self.job: Any = None
        self._bar: Any = None  # of the prediction that runs
        self._has_changed = False  # whether fields have since the last plan began
        self._cancelled = threading.Event()
        self.fields = {
            "layer": ComboBox(label="Layer", choices=self._list_images),
            "kind": ComboBox(label="Model", choices=[*kinds(), _CODE]),
            "model": FileEdit(label=" ", mode="d"),
            "class": LineEdit(label="Class", tooltip="or function of the file that returns the network, which runs"),
            "weights": FileEdit(label="Weights", tooltip="of a class: .pt, .safetensors"),
            "values": ComboBox(label="Values", choices=list(_VALUES)),
            "tile": LineEdit(label="Tile", tooltip="64; or 16, 64, 64; empty: the largest that memory allows"),
            "memory": SpinBox(label="Memory, MiB", max=2**20, tooltip="of a tile; 0: a quarter of what is free"),
            "output": FileEdit(label="Output", mode="w"),
            "overwrite": CheckBox(label="Overwrite"),
        }
        self.file, self.text = FileEdit(label="Open a file"), TextEdit()
        self.text.read_only, self.text.min_width, self.text.min_height = True, 320, 320
        actions = {"Plan": self._plan, "Preview": self._preview, "Seams": self._find_seams}
        actions |= {"Start": self._start, "Cancel": self._cancel}
        self.buttons = {name: PushButton(text=name) for name in actions}
        rows = [Container(widgets=list(self.buttons.values())[each], layout="horizontal") for each in _ROWS]
        super().__init__(widgets=[self.file, *self.fields.values(), *rows, self.text], labels=True)
        for name, action in actions.items():
            self.buttons[name].clicked.connect(self._worded(action))
        for field in self.fields.values():
            field.changed.connect(self._forget)
        self.fields["kind"].changed.connect(self._choose_mode)
        self.file.changed.connect(self._worded(self._open))
        events = napari_viewer.layers.events
        for event in (events.inserted, events.removed, events.renamed):
            event.connect(self.fields["layer"].reset_choices)
        self._choose_mode()
        self._forget()

    def _list_images(self, *_: Any) -> list[str]:
        return [each.name for each in self.viewer.layers if hasattr(each, "rgb")]

    def _choose_mode(self) -> None:
        kind = self.fields["kind"].value
        self.fields["model"].mode = "r" if "file" in kind else "d"
        for name in ("class", "weights"):
            self.fields[name].visible = kind == _CODE

    def _forget(self) -> None:
        """Forget the plan: fields have changed."""
        self.job, self._has_changed = None, True
        self._show(self.message if self.is_busy else _INVITATION)

    def _show(self, message: str) -> None:
        """Show a message, with the plan, and offer what can be done now."""
        self.message = message
        self.text.value = message if self.job is None else f"{message}\n\n{self.job.text}\n{self.job.plan}"
        for name, button in self.buttons.items():
            idle = not self.is_busy and (name == "Plan" or self.job is not None)
            button.enabled = self._bar is not None if name == "Cancel" else idle
        self.buttons["Start"].text = "Resume" if self.job is not None and self.job.is_begun else "Start"

    def _worded(self, action: Callable[..., object]) -> Callable[..., None]:
        """Return an action that shows its error in the widget: napari would show the traceback."""

        @wraps(action)  # signals look at the signature, and give as many arguments
        def act(*given: Any) -> None:
            _, problem = _capture(partial(action, *given))
            if problem:
                self._show(problem)

        return act

    def _work(self, doing: str, function: Callable[[], Any], done: Callable[[Any], str]) -> None:
        """Run a function in a thread; then `done` with its result in this one, which returns what is shown."""

        def finish(outcome: tuple[Any, str]) -> None:
            result, text = outcome
            self.is_busy = False
            if self._bar is not None:
                self._bar.close()
            self._bar = None
            if not text:
                shown, text = _capture(partial(done, result))
                text = text or shown
            elif text == _STOPPED and self.job is None:
                text = _STOPPED_AND_CHANGED
            self._show(text)

        self._cancelled.clear()
        self.is_busy = True
        self._show(doing)
        self._worker = create_worker(_capture, function)
        self._worker.returned.connect(finish)
        self._worker.start()

    def _open(self, path: Path) -> None:
        """Open a file as a layer, of which napari reads what it shows."""

        def add(volume: Volume) -> str:
            layer = self.viewer.add_image(volume, name=path.name, **layer_options(volume.metadata))
            self.fields["layer"].value = layer.name
            return f"Opened {path.name}."

        if path.exists() and not self.is_busy:
            self._work(f"Opening {path.name} …", partial(open_volume, path), add)

    def _plan(self) -> None:
        given = {name: field.value for name, field in self.fields.items()}
        volume = volume_of(self.viewer.layers[given["layer"]]) if given["layer"] else None

        def plan() -> Job:
            if volume is None:
                raise ValueError("there is no layer; fix: open a file.")
            tile = Tiles(parse_tile(given["tile"]), memory=given["memory"] * 2**20 or None)
            options: dict[str, Any] = {"reduce": _VALUES[given["values"]], "overwrite": given["overwrite"]}
            return Job(_open_model(given), volume, given["output"], tile=tile, **options)

        self._has_changed = False
        self._work("Planning …", plan, self._take_plan)

    def _take_plan(self, job: Job) -> str:
        if self._has_changed:  # the job would write elsewhere than the fields tell, or replace what they protect
            return "Fields have changed since; press Plan again."
        self.job = job
        return "An unfinished prediction is there: Resume goes on with it." if job.is_begun else "Planned."

    def _preview(self) -> None:
        """Predict the block at the position of the viewer, and show it as a layer."""
        job, layer = self.job, self.viewer.layers[self.fields["layer"].value]
        turn = find_affine(layer, job.given.metadata)

        def add(predicted: tuple[Volume, list[str]]) -> str:
            volume, names = predicted
            self._add(volume, "preview (this block alone)" if names else "preview", turn)
            if not names:
                return _ALONE
            some = ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
            return f"The preview is of this block alone: {some} will see all positions, which gives other numbers."

        position = position_of(self.viewer, layer, job.given)
        self._work("Predicting one block …", partial(job.preview, position), add)

    def _start(self) -> None:
        """Predict the volume, or go on with it, and show the file as a layer."""
        job, layer = self.job, self.viewer.layers[self.fields["layer"].value]
        turn, self._bar = find_affine(layer, job.given.metadata), progress(total=_STEPS, desc="predict")

        def show(share: float, text: str) -> None:
            # napari asks its workers to quit when it ends.
            if self._cancelled.is_set() or self._worker.abort_requested:
                raise _Cancelled
            self._move_bar(share, text)

        def add(volume: Volume) -> str:
            self._add(volume, job.out.name, turn)
            return f"Done: {job.out.name}."

        self._work("Predicting …", partial(job.run, show), add)

    @ensure_main_thread
    def _move_bar(self, share: float, text: str) -> None:
        bar = self._bar
        if bar is not None and text not in bar.desc:
            bar.set_description(text)
        # Bars let Qt work: what came in meanwhile has moved this one further, or closed it.
        if bar is not None and bar is self._bar:
            bar.update(max(0, int(share * _STEPS) - bar.n))

    def _cancel(self) -> None:
        self._cancelled.set()
        self._show("Stopping after this tile …")

    def _add(self, volume: Volume, name: str, turn: Affine) -> None:
        is_labels = np.dtype(volume.dtype).kind == "u"
        add = self.viewer.add_labels if is_labels else self.viewer.add_image
        options = layer_options(volume.metadata)
        add(volume, name=name, affine=turn.along(volume.metadata.axes), **options)

    def _find_seams(self) -> None:
        """Show what would come of tiles that run alone, as a picture in a dock."""
        job, folder = self.job, tempfile.TemporaryDirectory()
        picture = Path(folder.name) / "seams.png"

        def draw() -> str:
            report = find_seams(job.network, job.volume, job.plan.tile)
            report.plot(picture)
            return report.advice

        def show(advice: str) -> str:
            shown = Image(value=picture)
            shown.min_height = 320
            self.viewer.window.add_dock_widget(shown, name="Seams", area="bottom")
            folder.cleanup()
            return advice

        self._work("Comparing two tilings on part of the volume, which takes some hundred tiles …", draw, show)


def _open_model(given: Mapping[str, Any]) -> OpenedModel:
    if given["kind"] != _CODE:
        return open_model(given["kind"], given["model"])
    name = ":".join(filter(None, (str(given["model"]), given["class"])))
    return open_network(name, given["weights"] if given["weights"].is_file() else None)


def _capture(function: Callable[[], Any]) -> tuple[Any, str]:
    """Return the result of a function, or why there is none."""
    try:
        return function(), ""
    except _Cancelled:
        return None, _STOPPED
    except Exception as error:  # noqa: BLE001  # networks and files of others raise all kinds
        return None, word_error(error)
