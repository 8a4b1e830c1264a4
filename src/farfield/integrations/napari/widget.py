"""The widget "Predict a whole volume": what it is asked for becomes a `Job`, which runs in a thread of its own."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from farfield._checks import install_command
from farfield.integrations.jobs import Cancelled, Job
from farfield.integrations.napari.layers import layer_options, parse_tile, position_of, volume_of, word_error
from farfield.integrations.preview import Preview
from farfield.integrations.trained_models import MODELS, open_model
from farfield.streaming import SeamReport, Tiles
from farfield.volumes import Volume, open_volume

try:
    from napari.qt.threading import create_worker
    from napari.utils import progress
    from qtpy.QtCore import Qt, Signal
    from qtpy.QtGui import QPixmap
    from qtpy.QtWidgets import (
        QCheckBox,
        QComboBox,
        QFileDialog,
        QFormLayout,
        QGridLayout,
        QHBoxLayout,
        QLabel,
        QLineEdit,
        QPlainTextEdit,
        QPushButton,
        QSpinBox,
        QVBoxLayout,
        QWidget,
    )
except ImportError as missing:
    text = f"farfield.integrations.napari: {missing.name} is not installed; fix: {install_command('napari')}"
    raise ImportError(text) from missing

# What the output holds, as it is chosen -> the argument `reduce`.
_REDUCTIONS = {"as the model has it": None, "labels": "argmax", "probabilities": "softmax"}
# Steps of the progress bar: the work of a prediction is too large a number for Qt.
_STEPS = 1000


class _Outcome(NamedTuple):
    """What a thread ends with: a result, or a sentence that tells why there is none."""

    result: Any = None
    problem: str = ""


class PredictVolume(QWidget):
    """A widget that predicts a layer, or a file, of any size by a trained model: planned, tried out, run, resumed.

    Args:
        napari_viewer: The viewer, which napari passes by this name.

    Attributes:
        job: What was planned for the fields as they are; None where they have changed since.
    """

    # The share that is done, and the name of the pass; from the thread that predicts to the one that draws.
    moved = Signal(float, str)

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__()
        self.viewer = napari_viewer
        self.job: Job | None = None
        self._bar: Any = None
        self._worker: Any = None
        self._cancel = threading.Event()
        self._make_fields()
        self._arrange()
        self._connect()
        self._list_layers()
        self._forget()

    # ---- what is seen ------------------------------------------------------------------------------------------------
    def _make_fields(self) -> None:
        self.layer, self.kind, self.reduction = QComboBox(), QComboBox(), QComboBox()
        self.kind.addItems(list(MODELS))
        self.reduction.addItems(list(_REDUCTIONS))
        self.path, self.model, self.output, self.tile = QLineEdit(), QLineEdit(), QLineEdit(), QLineEdit()
        self.path.setPlaceholderText("or open .tif, .nii.gz, .zarr, … and press Enter")
        self.output.setPlaceholderText(".zarr, .ome.zarr, .tif or .ome.tif")
        self.tile.setPlaceholderText("the largest; or 64; or 16, 64, 64")
        self.browse, self.overwrite = QPushButton("…"), QCheckBox("Overwrite")
        self.memory = QSpinBox()
        self.memory.setRange(0, 2**20)
        self.memory.setSuffix(" MiB")
        self.memory.setSpecialValueText("a quarter of what is free")
        self.buttons = {
            "plan": QPushButton("Plan"),
            "preview": QPushButton("Preview"),
            "seams": QPushButton("Seams"),
            "start": QPushButton("Start"),
            "cancel": QPushButton("Cancel"),
        }
        self.message, self.text = QLabel(), QPlainTextEdit()
        self.message.setWordWrap(True)
        self.message.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.text.setReadOnly(True)

    def _arrange(self) -> None:
        model, output, buttons = QHBoxLayout(), QHBoxLayout(), QGridLayout()
        for widget in (self.model, self.browse):
            model.addWidget(widget)
        for widget in (self.output, self.overwrite):
            output.addWidget(widget)
        for number, button in enumerate(self.buttons.values()):
            buttons.addWidget(button, number // 3, number % 3)
        form = QFormLayout()
        rows = {
            "Layer": self.layer,
            "": self.path,
            "Model": self.kind,
            " ": model,
            "Values": self.reduction,
            "Tile": self.tile,
            "Memory": self.memory,
            "Output": output,
        }
        for name, field in rows.items():
            form.addRow(name, field)
        layout = QVBoxLayout(self)
        layout.addLayout(form)
        layout.addLayout(buttons)
        layout.addWidget(self.message)
        layout.addWidget(self.text, 1)

    def _connect(self) -> None:
        for event in (self.viewer.layers.events.inserted, self.viewer.layers.events.removed):
            event.connect(self._list_layers)
        for combo in (self.layer, self.kind, self.reduction):
            combo.currentIndexChanged.connect(self._forget)
        for line in (self.model, self.output, self.tile):
            line.textChanged.connect(self._forget)
        self.memory.valueChanged.connect(self._forget)
        self.overwrite.toggled.connect(self._forget)
        self.path.returnPressed.connect(self._open_path)
        self.browse.clicked.connect(self._browse)
        actions = (self.make_plan, self.preview, self.find_seams, self.start, self.cancel)
        for button, action in zip(self.buttons.values(), actions, strict=True):
            button.clicked.connect(action)
        self.moved.connect(self._move_bar)

    def _list_layers(self, event: Any = None) -> None:
        """List the image layers again, and keep the one that is chosen."""
        chosen, names = self.layer.currentText(), [each.name for each in self.viewer.layers if hasattr(each, "rgb")]
        self.layer.blockSignals(True)
        self.layer.clear()
        self.layer.addItems(names)
        self.layer.setCurrentText(chosen)
        self.layer.blockSignals(False)
        if self.layer.currentText() != chosen:
            self._forget()

    def _forget(self, *changed: object) -> None:
        """Forget the plan: fields have changed."""
        self.job = None
        self.text.clear()
        self._enable()

    def _enable(self) -> None:
        """Offer what can be done now."""
        busy, planned = self._worker is not None, self.job is not None
        for name, button in self.buttons.items():
            button.setEnabled(busy if name == "cancel" else not busy and (planned or name == "plan"))
        self.buttons["start"].setText("Resume" if self.job is not None and self.job.is_begun else "Start")

    def _browse(self) -> None:
        """Choose the model: a file of TorchScript, or the folder of any other."""
        is_file = "file" in self.kind.currentText()
        found = QFileDialog.getOpenFileName(self)[0] if is_file else QFileDialog.getExistingDirectory(self)
        self.model.setText(found or self.model.text())

    # ---- what is done ------------------------------------------------------------------------------------------------
    def _work(self, doing: str, function: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run a function in a thread, then `done` with its result in this one, or show why there is none."""
        if self._worker is not None:
            return
        self._cancel.clear()
        self.message.setText(doing)
        self._worker = create_worker(_capture, function)
        self._worker.returned.connect(partial(self._finish, done))
        self._enable()
        self._worker.start()

    def _finish(self, done: Callable[[Any], None], outcome: _Outcome) -> None:
        self._worker = None
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self.message.setText(outcome.problem)
        if not outcome.problem:
            done(outcome.result)
        self._enable()

    def _open_path(self) -> None:
        path = self.path.text().strip()
        self._work(f"Opening {path} …", partial(open_volume, path), partial(self._add_opened, Path(path).name))

    def _add_opened(self, name: str, volume: Volume) -> None:
        layer = self.viewer.add_image(volume, name=name, **layer_options(volume.metadata))
        self.layer.setCurrentText(layer.name)

    def make_plan(self) -> None:
        """Open the model and plan the prediction, which shows the plan."""
        try:
            fields = {"layer": self.layer.currentText(), "model": self.model.text(), "output": self.output.text()}
            if missing := [name for name, given in fields.items() if not given.strip()]:
                raise ValueError(f"No {' and no '.join(missing)} is given; fix: fill in the field.")
            size, memory = parse_tile(self.tile.text()), self.memory.value() * 2**20 or None
        except ValueError as error:
            self.message.setText(str(error))
            return
        volume, kind = volume_of(self._chosen()), self.kind.currentText()
        model, output = self.model.text().strip(), self.output.text().strip()
        reduce, overwrite = _REDUCTIONS[self.reduction.currentText()], self.overwrite.isChecked()

        def plan() -> tuple[str, Job]:
            opened = open_model(kind, model)
            options: dict[str, Any] = {"tile": Tiles(size, memory=memory), "reduce": reduce, "overwrite": overwrite}
            return opened.text, Job(opened, volume, output, **options)

        self._work("Planning …", plan, self._show_plan)

    def _show_plan(self, planned: tuple[str, Job]) -> None:
        text, self.job = planned
        begun = "\nan unfinished prediction of this is there: Resume goes on with it" if self.job.is_begun else ""
        self.text.setPlainText(f"{text}\n{self.job.plan}{begun}")

    def preview(self) -> None:
        """Predict the block at the position of the viewer, and show it as a layer."""
        if self.job is not None:
            position = position_of(self.viewer, self._chosen(), self.job.volume.metadata.axes)
            self._work("Predicting one block …", partial(self.job.preview, position), self._add_preview)

    def _add_preview(self, preview: Preview) -> None:
        name = "preview" if preview.is_exact else "preview (this block alone)"
        self._add(preview.volume, name, preview.start)
        self.message.setText(f"Preview: {preview.text}.")

    def start(self) -> None:
        """Predict the volume, or go on with it."""
        if self.job is None:
            return
        self._bar = progress(total=_STEPS, desc="predict")
        run = partial(self.job.run, self.moved.emit, self._is_cancelled)
        self._work("Predicting …", run, partial(self._add_result, self.job.out.name))

    def _is_cancelled(self) -> bool:
        """Whether Cancel was pressed, or napari ends: it then asks its workers to quit."""
        return self._cancel.is_set() or (self._worker is not None and self._worker.abort_requested)

    def _move_bar(self, share: float, text: str) -> None:
        if self._bar is not None:
            self._bar.set_description(text)
            self._bar.update(int(share * _STEPS) - self._bar.n)

    def cancel(self) -> None:
        """Stop after the tile that runs; what is finished is kept."""
        self._cancel.set()
        self.message.setText("Stopping after this tile …")

    def _add_result(self, name: str, volume: Volume) -> None:
        self._add(volume, name)
        self.message.setText(f"Done: {name}.")

    def _add(self, volume: Volume, name: str, start: Any = None) -> Any:
        """Add a volume as a layer; labels where the network gives them."""
        options = layer_options(volume.metadata, start)
        add = self.viewer.add_labels if np.dtype(volume.dtype).kind == "u" else self.viewer.add_image
        return add(volume, name=name, **options)

    def find_seams(self) -> None:
        """Show how far the result depends on where tiles are cut, as a picture and as text."""
        if self.job is not None:
            self._work("Comparing two tilings …", partial(_draw_seams, self.job), self._show_seams)

    def _show_seams(self, drawn: tuple[SeamReport, bytes]) -> None:
        report, picture = drawn
        pixels = QPixmap()
        pixels.loadFromData(picture)
        label = QLabel()
        label.setPixmap(pixels.scaledToWidth(900, Qt.TransformationMode.SmoothTransformation))
        self.viewer.window.add_dock_widget(label, name="Seams", area="bottom")
        self.text.setPlainText(str(report))

    def _chosen(self) -> Any:
        return self.viewer.layers[self.layer.currentText()]


def _capture(function: Callable[[], Any]) -> _Outcome:
    """Call a function, and return an error as its sentence: napari would show the traceback of one that is raised."""
    try:
        return _Outcome(function())
    except Cancelled:
        return _Outcome(problem="Stopped. Resume goes on from the tiles that are finished.")
    except Exception as error:  # noqa: BLE001  # networks and files of others raise all kinds
        return _Outcome(problem=word_error(error))


def _draw_seams(job: Job) -> tuple[SeamReport, bytes]:
    report = job.find_seams()
    with tempfile.TemporaryDirectory() as folder:
        report.plot(Path(folder) / "seams.png")
        return report, (Path(folder) / "seams.png").read_bytes()
