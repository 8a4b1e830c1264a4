"""A prediction that was begun and is called again: files cut short, damaged progress, folders of somebody else."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import zarr
from torch import nn
from tqdm import tqdm

from farfield import streaming
from farfield.streaming import Tiles, layers, predict_whole, prediction, respond_whole
from farfield.streaming.engines import local
from farfield.streaming.records import pack, unpack
from farfield.volumes import sink
from helpers.stopping import StopError, recording_tasks, stopping
from helpers.streamed_nets import Hourglass, attention, settled

# Plans are the same in many calls, and take much of their time.
pytestmark = pytest.mark.usefixtures("planned_once")

SIZE = (20, 24)
TILE = (10, 8)
TILES = 6
SUFFIXES = (".npy", ".tif", ".nii.gz", ".zarr")


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    convolutions = [nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 1, 3, padding=1)]
    return settled(nn.Sequential(convolutions[0], attention("factorized_gaussian"), convolutions[1]))


@pytest.fixture(scope="module")
def volume() -> np.ndarray:
    return np.random.default_rng(0).random(SIZE, "float32")


@pytest.fixture(scope="module")
def want(net: torch.nn.Module, volume: np.ndarray) -> np.ndarray:
    return predict_whole(net, volume, tile=TILE, quiet=True)


@pytest.fixture
def stop(net: torch.nn.Module, volume: np.ndarray, tmp_path: Path) -> Callable:
    """Begin a prediction of 2 passes, and stop it before it runs so many tiles."""

    def stopped(suffix: str, tasks: int = TILES + 5, tile: Any = TILE) -> Path:
        out = tmp_path / f"out{suffix}"
        with stopping(tasks):
            predict_whole(net, volume, tile=tile, out=out, quiet=True)
        return out

    return stopped


def growing(out: Path) -> Path:
    return out.with_name(f"{out.name}.unfinished") / out.name


def state(out: Path) -> Path:
    return growing(out).with_name("progress.zip")


# ---- the file that grows ---------------------------------------------------------------------------------------------
def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def cut_to_its_header(file: Path) -> None:
    os.truncate(file, 40)


def cut_to_nothing(file: Path) -> None:
    os.truncate(file, 0)


def one_number_changed(file: Path) -> None:
    with file.open("r+b") as opened:
        # In the first tile, which is written: behind the header, which is shorter than that.
        opened.seek(file.stat().st_size - 4 * SIZE[0] * SIZE[1] + 8)
        opened.write(b"\x00\x00\x80\x3f")


def another_shape(file: Path) -> None:
    np.save(file, np.zeros((SIZE[1], SIZE[0]), "float32"))


def gone(file: Path) -> None:
    file.unlink()


def a_link_to_a_copy(file: Path) -> None:
    shutil.copy(file, file.parents[1] / "copy")
    file.unlink()
    file.symlink_to(file.parents[1] / "copy")


DAMAGES = (cut_short, cut_to_its_header, cut_to_nothing, one_number_changed, another_shape, gone, a_link_to_a_copy)


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [*((".npy", each) for each in DAMAGES), (".tif", gone), (".tif", a_link_to_a_copy)],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_a_file_that_lost_what_was_written_is_made_anew(
    suffix: str,
    damage: Callable[[Path], None],
    stop: Callable,
    net: torch.nn.Module,
    volume: np.ndarray,
    want: np.ndarray,
) -> None:
    out = stop(suffix)
    damage(growing(out))
    copy = out.with_name("copy")
    before = copy.read_bytes() if copy.exists() else b""
    text = f'predict_whole: "{growing(out)}" does not hold any more what was written to it; it is made anew, and its 4'
    with pytest.warns(UserWarning, match=re.escape(text)) as told:
        got = predict_whole(net, volume, tile=TILE, out=out, quiet=True)
    assert [each.filename for each in told] == [__file__]
    np.testing.assert_array_equal(got, want)
    assert not out.is_symlink()
    assert (copy.read_bytes() if copy.exists() else b"") == before


def chunk_lost(folder: Path) -> None:
    next(each for each in sorted(folder.rglob("c/*/*")) if each.is_file()).unlink()


def chunk_cut_short(folder: Path) -> None:
    cut_short(next(each for each in sorted(folder.rglob("c/*/*")) if each.is_file()))


def description_lost(folder: Path) -> None:
    (folder / "zarr.json").unlink()


def description_garbled(folder: Path) -> None:
    (folder / "zarr.json").write_text("{")


def description_of_another(folder: Path) -> None:
    shutil.rmtree(folder)
    zarr.create_array(str(folder), shape=SIZE, chunks=TILE, dtype="float64")


CHUNKS = (chunk_lost, chunk_cut_short, description_lost, description_garbled, description_of_another)


@pytest.mark.parametrize("damage", CHUNKS, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("suffix", [".zarr", ".tif"])
def test_a_zarr_that_lost_what_was_written_is_made_anew(
    suffix: str,
    damage: Callable[[Path], None],
    stop: Callable,
    net: torch.nn.Module,
    volume: np.ndarray,
    want: np.ndarray,
) -> None:
    out = stop(suffix)
    # The tiles of a TIFF file are beside it until all are there.
    damage(growing(out) if suffix == ".zarr" else growing(out).with_name("tiles") / "0")
    with pytest.warns(UserWarning, match="does not hold any more what was written to it"):
        got = predict_whole(net, volume, tile=TILE, out=out, quiet=True)
    np.testing.assert_array_equal(got[:], want)
    assert got.dtype == want.dtype


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_whole_file_is_gone_on_with(
    suffix: str, stop: Callable, net: torch.nn.Module, volume: np.ndarray, want: np.ndarray
) -> None:
    out = stop(suffix)
    with warnings.catch_warnings(), recording_tasks() as tasks:
        warnings.simplefilter("error")
        got = predict_whole(net, volume, tile=TILE, out=out, quiet=True)
    np.testing.assert_array_equal(got[:], want)
    assert tasks == [(1, 4), (1, 5)]  # the tiles that were left


def test_what_was_written_is_looked_at_after_the_last_tile_too(
    stop: Callable,
    net: torch.nn.Module,
    volume: np.ndarray,
    want: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out.npy"

    def stopped(*arguments: Any) -> None:
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(sink.FileOutput, "finish", stopped)
        with pytest.raises(StopError):
            predict_whole(net, volume, tile=TILE, out=out, quiet=True)
    cut_short(growing(out))
    text = f"its {TILES} tiles are computed again"
    with pytest.warns(UserWarning, match=text) as said, recording_tasks() as tasks:
        got = predict_whole(net, volume, tile=TILE, out=out, quiet=True)
    assert len(said) == 1
    np.testing.assert_array_equal(got, want)
    assert tasks == [(1, index) for index in range(TILES)]  # the last pass alone


# ---- the file that says how far it is --------------------------------------------------------------------------------
class Malicious:
    def __reduce__(self) -> tuple:
        return os.mkdir, (Path.cwd() / "ran",)


def truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 30)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def text(file: Path) -> None:
    file.write_text("tile 3")


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps(Malicious()))


def saved_by_torch(file: Path) -> None:
    torch.save({"identity": Malicious()}, file)


def one_byte_changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def rewritten(file: Path, change: Callable[[dict], object]) -> None:
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content["state.json"] = json.dumps(change(json.loads(content["state.json"]))).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, each in content.items():
            archive.writestr(name, each)


def of_another_version(file: Path) -> None:
    rewritten(file, lambda saved: saved | {"version": 99})


def of_the_first_version(file: Path) -> None:
    rewritten(file, lambda saved: saved | {"version": 1, "found": saved["stored"]})


def of_the_third_version(file: Path) -> None:
    """As farfield 0.2 wrote it."""
    new = ("stored", "on_disk")
    rewritten(file, lambda saved: {key: each for key, each in saved.items() if key not in new} | {"version": 3})


def of_another_kind(file: Path) -> None:
    rewritten(file, lambda saved: [saved])


def without_a_field(file: Path) -> None:
    rewritten(file, lambda saved: {key: value for key, value in saved.items() if key != "positions"})


def of_wrong_types(file: Path) -> None:
    rewritten(file, lambda saved: saved | {"positions": "three"})


def nested_deeply(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("state.json", "[" * 200_000)


FAULTS = (
    truncated,
    empty,
    text,
    pickled,
    saved_by_torch,
    one_byte_changed,
    of_another_version,
    of_the_first_version,
    of_the_third_version,
    of_another_kind,
    without_a_field,
    of_wrong_types,
    nested_deeply,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_damaged_progress_says_the_way_out_and_overwriting_is_one(
    fault: Callable[[Path], None],
    stop: Callable,
    net: torch.nn.Module,
    volume: np.ndarray,
    want: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = stop(".npy", 9)
    monkeypatch.chdir(out.parent)
    fault(state(out))
    for tile in (TILE, None):
        with pytest.raises(ValueError, match=r"predict_whole: .*is damaged: ") as error:
            predict_whole(net, volume, tile=tile, out=out, quiet=True)
        said = str(error.value)
        assert f'"{state(out)}", the progress of an unfinished prediction, is damaged: ' in said
        assert said.endswith(f'fix: to begin anew, remove "{state(out).parent}", or overwrite=True.')
        assert "weights_only" not in said
        assert "pickle" not in said
    got = predict_whole(net, volume, tile=TILE, out=out, overwrite=True, quiet=True)
    np.testing.assert_array_equal(got, want)
    assert [each.name for each in out.parent.iterdir()] == [out.name]


def test_removing_the_folder_is_a_way_out_too(
    stop: Callable, net: torch.nn.Module, volume: np.ndarray, want: np.ndarray
) -> None:
    out = stop(".npy", 9)
    empty(state(out))
    shutil.rmtree(state(out).parent)
    np.testing.assert_array_equal(predict_whole(net, volume, tile=TILE, out=out, quiet=True), want)


def test_a_layer_that_offers_no_overwriting_does_not_suggest_it(tmp_path: Path) -> None:
    layer, grid, out = settled(attention("siamese")), torch.randn(6, 8, 9), tmp_path / "out.npy"
    respond_whole(layer, grid, out=out, quiet=True)
    with pytest.raises(FileExistsError, match=r'respond_whole: ".*out.npy" exists; fix: another path\.$'):
        respond_whole(layer, grid, out=out, quiet=True)
    out.unlink()
    growing(out).parent.mkdir()
    (growing(out).parent / ".farfield").touch()
    empty(state(out))
    with pytest.raises(ValueError, match=r'respond_whole: .*fix: to begin anew, remove ".*out.npy.unfinished"\.$'):
        respond_whole(layer, grid, out=out, quiet=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("row", ["softmax", "kronecker_qkv", "factorized_gaussian"])
def test_summaries_come_back_as_they_were(row: str, dtype: torch.dtype) -> None:
    layer, grid = settled(attention(row)).to(dtype), torch.randn(1, 6, 4, 5, dtype=dtype)
    parts = layers.summarize_attention(layer, grid, mask=None, origin=(0, 0), size=(4, 5))
    saved = tuple(unpack(pack({"parts": parts}), {"parts": list})["parts"])
    whole, again = (layers.finish_attention(each, grid.device, complete=True) for each in (parts, saved))
    for one, other in zip([*whole[0], *(whole[1] or ())], [*again[0], *(again[1] or ())], strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_bit_of_a_record_that_flips_is_noticed_or_changes_nothing() -> None:
    fields = {"parts": list, "on_disk": bool}
    content = pack({"parts": [torch.arange(3.0)], "on_disk": False})
    want = unpack(content, fields)
    noticed = 0
    for bit in range(0, 8 * len(content), 3):  # of each byte two or three
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert same(unpack(bytes(flipped), fields), want), f"bit {bit} of {8 * len(content)}"
        except ValueError:
            noticed += 1
    assert noticed > len(content)


def test_another_network_does_not_take_the_tiles_of_an_unfinished_prediction(
    stop: Callable, volume: np.ndarray, net: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    out = stop(".npy")
    predict_whole(net, volume, out=out)  # the same network: its tiles, 6 of them
    assert f"{TILES} tiles of 10 × 8 positions" in capsys.readouterr().err
    out.unlink()
    stop(".npy")
    predict_whole(settled(Hourglass("siamese", 2)), volume, out=out, overwrite=True)
    assert "1 tile of 20 × 24 positions" in capsys.readouterr().err


def test_a_mask_of_the_context_is_not_one_of_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, grid, context = settled(attention("siamese")), torch.randn(6, 8, 9), torch.randn(6, 8, 9)
    mask, out = torch.rand(8, 9) > 0.3, tmp_path / "out.npy"

    def stopped(*arguments: Any) -> None:
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(sink.FileOutput, "finish", stopped)
        with pytest.raises(StopError):
            respond_whole(layer, grid, context=context, context_mask=mask, tile=(4, 9), out=out, quiet=True)
    with pytest.raises(ValueError, match=r"unfinished .*another volume; fix: "):
        respond_whole(layer, grid, context=context, mask=mask, tile=(4, 9), out=out, quiet=True)


def test_a_change_that_float32_does_not_have_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "run_check", lambda *arguments: None)  # which reads the volume too
    net = settled(nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), attention("siamese"), nn.Conv2d(6, 1, 1))).double()

    class Changing:
        """An array whose numbers grow a little when all tiles have been read once."""

        def __init__(self) -> None:
            self.array, self.reads = np.random.default_rng(0).random(SIZE), 0
            self.shape, self.dtype = self.array.shape, self.array.dtype

        def __getitem__(self, index: Any) -> np.ndarray:
            self.reads += 1
            return self.array[index] * (1 + 1e-12 * (self.reads > TILES))

    with pytest.raises(ValueError, match=r"predict_whole: .*volume .*changed in tile 0\b"):
        predict_whole(net, Changing(), tile=Tiles(TILE, memory=0), quiet=True)  # nothing stored: it is read twice


def test_a_full_disk_at_the_first_save_names_no_folder_that_is_gone(
    net: nn.Module, volume: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(streaming.progress, "replace_file", full)
    with pytest.raises(OSError, match=r'predict_whole: cannot write ".*out.npy": .*; nothing was written; fix:'):
        predict_whole(net, volume, tile=TILE, out=tmp_path / "out.npy", quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("changed", ["grid", "context", "mask of the grid", "mask of the context"])
def test_whatever_a_layer_reads_is_looked_at_again(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, out = settled(attention("kronecker_qkv")), tmp_path / "out.npy"
    arrays = {
        "grid": torch.randn(6, 8, 9),
        "context": torch.randn(6, 5, 4),
        "mask of the grid": torch.rand(8, 9) > 0.3,
        "mask of the context": torch.rand(5, 4) > 0.3,
    }

    def respond() -> Any:
        grid, context, mask, context_mask = arrays.values()
        options = {"context": context, "mask": mask, "context_mask": context_mask, "tile": (4, 9)}
        return respond_whole(layer, grid, **options, out=out, quiet=True)

    def stopped(*arguments: Any) -> None:
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(sink.FileOutput, "finish", stopped)
        with pytest.raises(StopError):
            respond()
    arrays[changed] = ~arrays[changed] if arrays[changed].dtype == torch.bool else arrays[changed] + 1
    with pytest.raises(ValueError, match=rf"respond_whole: the {changed} .*changed in tile 0\b"):
        respond()


# ---- folders and paths that are somebody's ---------------------------------------------------------------------------
def test_a_folder_of_somebody_is_not_emptied(net: torch.nn.Module, volume: np.ndarray, tmp_path: Path) -> None:
    out, theirs = tmp_path / "out.npy", tmp_path / "photographs"
    theirs.mkdir()
    (theirs / "mine.jpg").write_text("mine")
    folder = growing(out).parent
    folder.symlink_to(theirs)
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r'predict_whole: ".*unfinished" is a link'):
            predict_whole(net, volume, tile=TILE, out=out, overwrite=overwrite, quiet=True)
    folder.unlink()
    theirs.rename(folder)
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match=r'".*unfinished" .*farfield did not write, .*; fix: '):
            predict_whole(net, volume, tile=TILE, out=out, overwrite=overwrite, quiet=True)
    assert (folder / "mine.jpg").read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == [folder.name]


def test_a_folder_of_an_earlier_version_is_named(net: torch.nn.Module, volume: np.ndarray, tmp_path: Path) -> None:
    folder = growing(tmp_path / "out.npy").parent
    folder.mkdir()
    torch.save({"stage": 1}, folder / "progress.pt")
    with pytest.raises(FileExistsError, match=r'".*unfinished" .*farfield did not write'):
        predict_whole(net, volume, tile=TILE, out=tmp_path / "out.npy", quiet=True)


def test_a_link_is_not_written_through(net: torch.nn.Module, volume: np.ndarray, tmp_path: Path) -> None:
    precious = tmp_path / "precious.npy"
    np.save(precious, np.zeros(3))
    before = precious.read_bytes()
    (tmp_path / "out.npy").symlink_to(precious)
    (tmp_path / "nowhere.npy").symlink_to(tmp_path / "missing")
    for name in ("out.npy", "nowhere.npy"):
        for overwrite in (False, True):
            with pytest.raises(FileExistsError, match=f'".*{name}" is a link.*; fix:'):
                predict_whole(net, volume, tile=TILE, out=tmp_path / name, overwrite=overwrite, quiet=True)
    assert precious.read_bytes() == before


def results(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").touch()


def group(path: Path) -> None:
    zarr.open_group(str(path)).create_array("a", data=np.ones(3))


def array_and_more(path: Path) -> None:
    zarr.create_array(str(path), data=np.ones(3))
    (path / "mine.txt").touch()


def chunks_alone(path: Path) -> None:
    (path / "c").mkdir(parents=True)
    (path / "c" / "mine").touch()


def damaged_array(path: Path) -> None:
    chunks_alone(path)
    (path / "zarr.json").write_text("{")


def file(path: Path) -> None:
    path.write_text("mine")


@pytest.mark.parametrize(
    ("name", "make", "text"),
    [
        ("out.zarr", results, "a folder that is not one zarr array or image and nothing else"),
        ("out.zarr", group, "a folder that is not one zarr array or image and nothing else"),
        ("out.zarr", array_and_more, "a folder that is not one zarr array or image and nothing else"),
        ("out.zarr", chunks_alone, "a folder that is not one zarr array or image and nothing else"),
        ("out.zarr", damaged_array, "a folder that is not one zarr array or image and nothing else"),
        ("out.npy", results, "a folder"),
        ("out.zarr", file, "not a zarr array"),
    ],
)
def test_overwriting_replaces_what_it_would_write_and_nothing_else(
    name: str, make: Callable[[Path], None], text: str, net: torch.nn.Module, volume: np.ndarray, tmp_path: Path
) -> None:
    make(tmp_path / name)
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match=f'predict_whole: ".*{name}" is {text}, and is not overwritten; fix: '):
        predict_whole(net, volume, tile=TILE, out=tmp_path / name, overwrite=True, quiet=True)
    assert sorted(str(each) for each in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_appears_at_the_path_meanwhile_is_left(
    suffix: str, stop: Callable, net: torch.nn.Module, volume: np.ndarray, want: np.ndarray
) -> None:
    out = stop(suffix)
    finish = sink.FileOutput.finish

    def interrupted(output: Any) -> Any:
        out.write_text("mine") if suffix != ".zarr" else zarr.create_array(str(out), data=np.ones(3))
        return finish(output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink.FileOutput, "finish", interrupted)
        with pytest.raises(FileExistsError, match=r'".*" exists; fix: .*overwrite=True'):
            predict_whole(net, volume, tile=TILE, out=out, quiet=True)
    assert out.is_dir() if suffix == ".zarr" else out.read_text() == "mine"
    got = predict_whole(net, volume, tile=TILE, out=out, overwrite=True, quiet=True)  # the fix works
    np.testing.assert_array_equal(got[:], want)
    assert [each.name for each in out.parent.iterdir()] == [out.name]


class RecordedBar(tqdm):
    """A progress bar that records its steps, and where it began."""

    bars: ClassVar[list[RecordedBar]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.first, self.steps = options["initial"], list[float]()
        self.bars.append(self)

    def update(self, n: float | None = 1) -> bool | None:
        self.steps.append(n or 0)
        return super().update(n)


def test_the_bar_weighs_a_tile_by_the_work_of_its_pass(
    net: torch.nn.Module, volume: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(local, "tqdm", RecordedBar)
    out, work = tmp_path / "out.npy", [each.macs for each in streaming.plan_whole(net, SIZE, tile=TILE).passes]
    assert max(work) > 1.1 * min(work)
    first, second = (round(each / TILES) for each in work)
    with stopping(TILES + 2):
        predict_whole(net, volume, tile=TILE, out=out)
    predict_whole(net, volume, tile=TILE, out=out)
    stopped, resumed = RecordedBar.bars
    assert [*stopped.steps, *resumed.steps] == [first] * TILES + [second] * TILES
    assert resumed.first == sum(stopped.steps)
    assert resumed.total == resumed.n == TILES * (first + second)
    shown = capfd.readouterr().err
    assert "pass 2 of 2: 100%" in shown
    assert "tile/s" not in shown


def test_an_unfinished_file_that_is_lost_is_not_the_older_one_at_its_path(
    net: torch.nn.Module, volume: np.ndarray, want: np.ndarray, tmp_path: Path
) -> None:
    out = tmp_path / "out.npy"
    np.save(out, np.zeros_like(want))
    with stopping(3):
        predict_whole(net, volume, tile=TILE, out=out, overwrite=True, quiet=True)
    growing(out).unlink()
    got = predict_whole(net, volume, tile=TILE, out=out, overwrite=True, quiet=True)
    np.testing.assert_array_equal(got, want)
