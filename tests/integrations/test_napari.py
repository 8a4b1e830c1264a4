"""napari: what needs no window here, and the widget driven in an environment that has napari."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from farfield.integrations.napari.layers import (
    find_affine,
    layer_options,
    parse_tile,
    position_of,
    volume_of,
    word_error,
)
from farfield.volumes import ImageMetadata, Volume
from helpers.environments import make_environment, run_in

PROGRAM = Path(__file__).with_name("napari_program.py")
MANIFEST = Path(__file__).parents[2] / "src" / "farfield" / "integrations" / "napari" / "napari.yaml"


def layer(data: Any, **options: Any) -> Any:
    dims = len(data.shape) - bool(options.get("rgb"))
    known = {
        "scale": [1.0] * dims,
        "translate": [0.0] * dims,
        "units": ["pixel"] * dims,
        "axis_labels": [f"axis {number - dims}" for number in range(dims)],
        "multiscale": False,
        "rgb": False,
    }
    return SimpleNamespace(data=data, **known | options)


# ---- layers ----------------------------------------------------------------------------------------------------------
def test_a_plain_layer_knows_its_letters_alone() -> None:
    assert volume_of(layer(np.zeros((3, 4, 5)))).metadata == ImageMetadata("ZYX")
    assert volume_of(layer(np.zeros((2, 3, 4, 5)))).metadata == ImageMetadata("CZYX")
    assert volume_of(layer(np.zeros((4, 5, 3)), rgb=True)).metadata == ImageMetadata("YXC")
    labelled = layer(np.zeros((3, 4, 5)), axis_labels=["t", "y", "x"])
    assert volume_of(labelled).metadata == ImageMetadata("TYX")


def test_scale_units_and_place_come_through() -> None:
    given = layer(np.zeros((3, 4, 5)), scale=[2, 0.5, 0.5], units=["micrometer"] * 3, translate=[0, 7, 0])
    metadata = volume_of(given).metadata
    assert metadata.spacing == {"Z": 2, "Y": 0.5, "X": 0.5}
    assert metadata.units == dict.fromkeys("ZYX", "micrometer")
    assert metadata.origin["Y"] == 7
    options = layer_options(metadata)
    assert options["scale"] == [2, 0.5, 0.5]
    assert options["translate"] == [0, 7, 0]
    assert options["axis_labels"] == ["z", "y", "x"]


@pytest.mark.parametrize(("shape", "axes"), [((3, 40, 50, 3), "ZYXC"), ((2, 3, 40, 50, 4), "TZYXC")])
def test_colors_are_the_last_axis_of_a_stack_too(shape: tuple[int, ...], axes: str) -> None:
    metadata = volume_of(layer(np.zeros(shape), rgb=True, scale=[1.0] * (len(shape) - 4) + [3, 2, 0.5])).metadata
    assert metadata.axes == axes
    assert metadata.spacing == {"Z": 3, "Y": 2, "X": 0.5}
    labelled = layer(np.zeros((5, 40, 50, 3)), rgb=True, axis_labels=["t", "y", "x"])
    assert volume_of(labelled).metadata.axes == "TYXC"


def test_a_place_without_a_scale_comes_through() -> None:
    metadata = volume_of(layer(np.zeros((4, 5)), translate=[100, 0])).metadata
    assert metadata.origin == {"Y": 100}
    assert layer_options(metadata)["translate"] == [100, 0]


def test_more_axes_than_letters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the layer has 6 axes, .*; fix: a layer of at most 5"):
        volume_of(layer(np.zeros((1, 1, 1, 1, 4, 5))))


def test_a_turned_layer_turns_what_is_made_of_it() -> None:
    turn, scale, start = np.array([[0.8, -0.6], [0.6, 0.8]]), np.diag([2, 0.5]), np.array([10, 3])
    own = layer(np.zeros((4, 5)), scale=[2, 0.5], translate=start)
    own.world_to_data = lambda point: np.linalg.inv(turn @ scale) @ (np.array(point) - start)
    known = volume_of(own).metadata
    affine = find_affine(own, known)
    part = layer_options(known.cropped({"Y": range(1, 3), "X": range(2, 5)}))
    world = affine.along("YX") @ (*(np.array(part["translate"]) + scale @ (1, 1)), 1)
    assert np.allclose(world[:2], start + turn @ scale @ (2, 3))
    # The channels of an output stay where they are.
    assert np.allclose(affine.along("CYX")[1:, 1:], affine.along("YX"))
    assert np.array_equal(affine.along("CYX")[0], [1, 0, 0, 0])


def test_a_volume_is_itself_and_a_pyramid_its_finest_level() -> None:
    volume = Volume(np.zeros((3, 4, 5)), ImageMetadata("ZYX", {"Z": 3.0}))
    assert volume_of(layer(volume)) is volume
    assert (volume.ndim, volume.size) == (3, 60)
    several = layer(np.zeros((4, 4)), multiscale=True)
    several.data = [np.zeros((4, 4)), np.zeros((2, 2))]
    assert volume_of(several).shape == (4, 4)


def test_a_file_without_letters_gets_those_of_its_number_of_axes() -> None:
    assert volume_of(layer(Volume(np.zeros((3, 4, 5)), ImageMetadata("QQQ")))).metadata.axes == "ZYX"


def test_the_position_is_that_of_the_sliders_and_the_middle_of_what_is_shown() -> None:
    dims = SimpleNamespace(point=(6.0, 0.0, 0.0), displayed=(1, 2))
    viewer = SimpleNamespace(dims=dims, camera=SimpleNamespace(center=(0.0, 10.2, 900.0)))
    own = layer(np.zeros((9, 30, 40)))
    own.world_to_data = lambda point: np.array(point) / (2, 1, 1)
    assert position_of(viewer, own, Volume(own.data, ImageMetadata("ZYX"))) == {"Z": 3, "Y": 10, "X": 39}


# ---- words -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            'predict_whole: "a.tif" exists; fix: another path, or overwrite=True.',
            '"a.tif" exists; fix: another path, or tick Overwrite.',
        ),
        (
            'Job: the output "a.png" must end in .tif; fix: "a.zarr".',
            'The output "a.png" must end in .tif; fix: "a.zarr".',
        ),
        (
            "tile must be at least 1, got 0; fix: tile=64, for example.",
            "Tile must be at least 1, got 0; fix: Tile 64, for example.",
        ),
    ],
)
def test_an_error_names_the_fields(text: str, want: str) -> None:
    assert word_error(ValueError(text)) == want


def test_an_error_without_a_text_has_its_name() -> None:
    assert word_error(MemoryError()) == "MemoryError"


def test_tiles_as_they_are_typed() -> None:
    assert parse_tile(" ") is None
    assert parse_tile("64") == 64
    assert parse_tile("16, 64 64") == [16, 64, 64]
    assert parse_tile("16×64 × 64") == [16, 64, 64]
    with pytest.raises(ValueError, match=r'Tile is "large"; fix: 64'):
        parse_tile("large")


@pytest.mark.long
def test_without_napari_the_error_names_the_extra() -> None:
    program = (
        "import sys; sys.modules |= dict.fromkeys(['magicgui', 'napari'])\nimport farfield.integrations.napari.widget"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "ImportError: farfield.integrations.napari: " in done.stderr
    assert '[napari]"' in done.stderr


# ---- the widget ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def python() -> Path:
    made = make_environment("napari")
    if made is None:
        pytest.skip("pip cannot install napari here")
    loaded = run_in(made, ["-c", "import PyQt6.QtWidgets"], made.parent)
    if "cannot open shared object file" in loaded.stderr:
        pytest.skip(f"Qt needs a library of the system: {loaded.stderr.splitlines()[-1]}")
    return made


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    """A screen that draws, as the layers of a viewer need."""
    program = shutil.which("Xvfb")
    if program is None:
        pytest.skip("there is no Xvfb, which draws a viewer without a screen")
    with subprocess.Popen(
        [program, "-displayfd", "1", "-screen", "0", "1600x1000x24"], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        yield f":{server.stdout.readline().decode().strip()}"
        server.terminate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    ["cancel_and_resume", "larger_than_memory", "previews", "sentences", "labels", "code", "changes", "layers"],
)
def test_the_widget(python: Path, tmp_path: Path, scenario: str) -> None:
    done = run_in(python, [str(PROGRAM), scenario, str(tmp_path)], tmp_path, OMP_NUM_THREADS="1")
    assert "as it should be" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_viewer_finds_the_widget_draws_seams_and_ends_while_it_predicts(
    python: Path, tmp_path: Path, display: str
) -> None:
    settings = {"DISPLAY": display, "QT_QPA_PLATFORM": "xcb", "OMP_NUM_THREADS": "1"}
    done = run_in(python, [str(PROGRAM), "through_the_manifest", str(tmp_path)], tmp_path, **settings)
    assert "as it should be" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_manifest_is_valid(python: Path, tmp_path: Path) -> None:
    done = run_in(python, ["-m", "npe2", "validate", str(MANIFEST)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "valid" in done.stdout.lower()
