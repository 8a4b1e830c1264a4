"""Volumes read from files of many kinds; predictions in files, whole or not at all, whatever happens between."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farfield.streaming import Tiles, predict_whole
from farfield.volumes.file_formats import FORMATS
from farfield.volumes.sink import FileOutput
from helpers.partly import partly
from helpers.stopping import recording_tasks, stopping
from helpers.streamed_nets import Hourglass, relative, settled

SIZE = (12, 20, 22)
SUFFIXES = (".npy", ".zarr", ".tif", ".ome.tiff")


@pytest.fixture
def volume() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, SIZE).astype("uint8")


@pytest.fixture
def net() -> torch.nn.Module:
    return settled(Hourglass("factorized_gaussian", 3))


def opened(kind: str, volume: np.ndarray, folder: Path) -> Any:
    """The volume as a file of some kind is read, none of it in memory."""
    import h5py
    import tifffile
    import zarr

    if kind == "memmap":
        np.save(folder / "volume.npy", volume)
        return np.load(folder / "volume.npy", mmap_mode="r")
    if kind == "big endian":
        return volume.astype(">u2")
    if kind == "zarr":
        return zarr.create_array(str(folder / "volume.zarr"), data=volume, chunks=(5, 7, 9))
    if kind == "h5py":
        return h5py.File(folder / "volume.h5", "w").create_dataset("volume", data=volume, chunks=(5, 7, 9))
    if kind == "tiff":
        tifffile.imwrite(folder / "volume.tif", volume, photometric="minisblack", compression="zlib")
        return zarr.open(tifffile.imread(folder / "volume.tif", aszarr=True), mode="r")
    return torch.from_numpy(volume)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["memmap", "big endian", "zarr", "h5py", "tiff", "tensor"])
def test_volumes_of_many_kinds(kind: str, volume: np.ndarray, net: torch.nn.Module, tmp_path: Path) -> None:
    got = predict_whole(net, opened(kind, volume, tmp_path), tile=(6, 8, 10), quiet=True)
    assert isinstance(got, torch.Tensor if kind == "tensor" else np.ndarray)
    with torch.no_grad():
        assert relative(got, net(torch.from_numpy(volume).float()[None, None])[0, 0]) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_hold_what_memory_would(suffix: str, volume: np.ndarray, net: torch.nn.Module, tmp_path: Path) -> None:
    path, want = tmp_path / f"restored{suffix}", predict_whole(net, volume, tile=(6, 8, 10), pad="reflect", quiet=True)
    got = predict_whole(net, volume, tile=(6, 8, 10), pad="reflect", out=path, quiet=True)
    np.testing.assert_array_equal(got[:], want)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with pytest.raises(FileExistsError, match=r'predict_whole: ".*restored.*" exists; fix: .*overwrite=True'):
        predict_whole(net, volume, tile=8, out=path, quiet=True)
    double = predict_whole(net, volume[:6] * 0.5, tile=8, out=path, overwrite=True, quiet=True)
    assert double.shape == (6, 20, 22)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.long
def test_files_as_others_read_them(volume: np.ndarray, net: torch.nn.Module, tmp_path: Path) -> None:
    import tifffile
    import zarr

    for suffix in SUFFIXES:
        predict_whole(net, volume, tile=8, out=tmp_path / f"out{suffix}", quiet=True)
    want = np.load(tmp_path / "out.npy")
    np.testing.assert_array_equal(tifffile.imread(tmp_path / "out.tif"), want)
    array = zarr.open_array(str(tmp_path / "out.zarr"), mode="r")
    np.testing.assert_array_equal(array[:], want)
    assert (array.metadata.zarr_format, array.chunks) == (3, (8, 8, 8))
    with tifffile.TiffFile(tmp_path / "out.ome.tiff") as file:
        assert (file.is_ome, file.series[0].axes, file.series[0].shape) == (True, "ZYX", SIZE)


def test_arrays_of_the_callers(volume: np.ndarray, net: torch.nn.Module, tmp_path: Path) -> None:
    import h5py

    want = predict_whole(net, volume, tile=8, quiet=True)
    with h5py.File(tmp_path / "out.h5", "w") as file:
        array = file.create_dataset("out", SIZE, "float64")
        assert predict_whole(net, volume, tile=8, out=array, quiet=True) is array
        np.testing.assert_array_equal(array[:], want)
    tensor = torch.zeros(SIZE)
    predict_whole(net, volume, tile=8, out=tensor, quiet=True)
    np.testing.assert_array_equal(tensor, want)


@pytest.mark.parametrize(
    ("path", "error", "text"),
    [
        ("out.png", ValueError, rf'must end in one of {", ".join(FORMATS)}; fix: ".*out.zarr"'),
        ("/", ValueError, rf'must end in one of {", ".join(FORMATS)}; fix: "/restored.zarr"'),
        ("nowhere/out.npy", FileNotFoundError, 'no folder ".*nowhere" for "out.npy"; fix: make that folder first'),
    ],
)
def test_paths_that_cannot_be(
    path: str, error: type, text: str, volume: np.ndarray, net: torch.nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        predict_whole(net, volume, tile=8, out=tmp_path / path, quiet=True)


# Where a script that is run by `python -c` finds the helpers.
TESTS = Path(__file__).parents[1]


# ---- killed and called again -----------------------------------------------------------------------------------------
CHILD = """
    import os, signal, sys
    from pathlib import Path
    import numpy as np
    import torch
    torch.set_num_threads(1)
    from farfield.streaming import predict_whole, progress, respond_whole
    from helpers.streamed_nets import Hourglass, attention, settled

    kill, out, how = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    taken, run_task = 0, progress.Stream.run_task

    def counted(*arguments):
        global taken
        run_task(*arguments)
        taken += 1
        if taken == kill:
            os.kill(os.getpid(), how)

    progress.Stream.run_task = counted
    volume = np.load(Path(out).with_name("volume.npy"), mmap_mode="r")
    {call}
    print(taken)
"""
CALLS = {
    "predict": "predict_whole(settled(Hourglass('kronecker_qkv', 3)), volume, tile=(6, 10, 12), out=out, quiet=True)",
    "respond": "respond_whole(settled(attention('factorized_gaussian', 12)), volume, tile=(12, 13), out=out, quiet=1)",
}


def command(call: str, kill: int, out: Path, how: signal.Signals = signal.SIGKILL) -> list[str]:
    """Of a process that makes a call and gets a signal when it has run the `kill`th tile of all passes."""
    script = textwrap.dedent(CHILD).format(call=CALLS[call])
    return [sys.executable, "-c", script, str(kill), str(out), str(int(how))]


def run(call: str, kill: int, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(call, kill, out), cwd=TESTS, capture_output=True, text=True, check=False)


def fingerprint(path: Path) -> dict[str, str]:
    """Of every byte of a file or folder."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return {str(each.relative_to(path)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files}


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "suffix", "kills"),
    partly([("predict", ".zarr", (20, 8)), ("respond", ".npy", (3,))], [("respond", ".npy", (3,))]),
)
def test_what_was_killed_goes_on_and_ends_with_the_same_file(
    call: str, suffix: str, kills: tuple[int, ...], volume: np.ndarray, tmp_path: Path
) -> None:
    np.save(tmp_path / "volume.npy", volume)
    plain, out = tmp_path / f"plain{suffix}", tmp_path / f"killed{suffix}"
    tiles = int(run(call, 0, plain).stdout)
    for kill in kills:
        assert run(call, kill, out).returncode == -signal.SIGKILL
        assert not out.exists()
    done = run(call, 0, out)
    assert done.returncode == 0, done.stderr
    # Tiles that were finished are read again, to see that they are what they were, but not computed.
    assert fingerprint(out) == fingerprint(plain)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([out.name, plain.name, "volume.npy"])
    assert tiles > max(kills)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_killed_at_any_tile(call: str, volume: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "volume.npy", volume)
    plain = tmp_path / "plain.npy"
    tiles = int(run(call, 0, plain).stdout)
    for kill in range(1, tiles + 1):
        out = tmp_path / f"killed{kill}.npy"
        assert run(call, kill, out).returncode == -signal.SIGKILL
        assert run(call, 0, out).returncode == 0
        assert fingerprint(out) == fingerprint(plain)


@pytest.mark.long
def test_two_processes_do_not_write_to_one_path(volume: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "volume.npy", volume)
    out = tmp_path / "out.npy"
    first = subprocess.Popen(command("predict", 5, out, signal.SIGSTOP), cwd=TESTS, stdout=subprocess.DEVNULL)
    try:
        assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1])
        held = fingerprint(tmp_path)
        second = run("predict", 0, out)
        assert f'BlockingIOError: predict_whole: another process is writing "{out}"; fix: wait' in second.stderr
        assert fingerprint(tmp_path) == held
    finally:
        first.kill()
        first.wait()
    # A process that was killed holds nothing, and what it did is gone on with.
    assert run("predict", 0, out).returncode == 0


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_call_that_comes_when_another_has_just_finished_leaves_nothing(suffix: str, tmp_path: Path) -> None:
    net, numbers, out = (
        torch.nn.Conv2d(1, 1, 3, padding=1).eval(),
        np.ones((32, 32), np.float32),
        tmp_path / f"o{suffix}",
    )
    hold = FileOutput.hold
    with pytest.MonkeyPatch.context() as patch:

        def hold_late(output: FileOutput) -> None:
            patch.undo()
            predict_whole(net, numbers, tile=16, out=out, quiet=True)
            hold(output)

        patch.setattr(FileOutput, "hold", hold_late)
        with pytest.raises(FileExistsError, match="exists; fix: "):
            predict_whole(net, numbers, tile=16, out=out, quiet=True)
    assert os.listdir(tmp_path) == [out.name]
    predict_whole(net, numbers, tile=16, out=out, overwrite=True, quiet=True)


@pytest.fixture
def begun(volume: np.ndarray, net: torch.nn.Module, tmp_path: Path) -> Path:
    """A prediction that was stopped in its last pass; 8 tiles, 4 passes."""
    out = tmp_path / "out.npy"
    with stopping(29):
        predict_whole(net, volume, tile=(6, 10, 12), out=out, quiet=True)
    return out


def test_finished_tiles_are_not_computed_again(begun: Path, volume: np.ndarray, net: torch.nn.Module) -> None:
    with recording_tasks() as tasks:
        predict_whole(net, volume, tile=(6, 10, 12), out=begun, quiet=True)
    assert tasks == [(3, tile) for tile in range(4, 8)]


def test_another_model_volume_or_tile_is_noticed(begun: Path, volume: np.ndarray, net: torch.nn.Module) -> None:
    folder = begun.with_name("out.npy.unfinished")
    held = fingerprint(folder)
    text = r'predict_whole: ".*out.npy.unfinished" holds an unfinished prediction with another {}; fix: call it with'
    options = {"out": begun, "quiet": True}
    with pytest.raises(ValueError, match=text.format("tile or halo")):
        predict_whole(net, volume, tile=8, **options)
    with pytest.raises(ValueError, match=text.format("volume")):
        predict_whole(net, volume.astype("float32"), tile=(6, 10, 12), **options)
    other = volume.copy()
    other[5, 5, 5] ^= 1
    with pytest.raises(ValueError, match=r"volume .*changed in tile 0\b.*; fix:"):
        predict_whole(net, other, tile=(6, 10, 12), **options)
    assert fingerprint(folder) == held
    with torch.no_grad():
        net.last.bias += 1
    with pytest.raises(ValueError, match=text.format("model")):
        predict_whole(net, volume, tile=(6, 10, 12), **options)
    got = predict_whole(net, volume, tile=8, overwrite=True, **options)
    with torch.no_grad():
        assert relative(got, net(torch.from_numpy(volume).float()[None, None])[0, 0]) < 1e-5


def test_tiles_that_memory_chose_stay_chosen(begun: Path, volume: np.ndarray, net: torch.nn.Module) -> None:
    assert predict_whole(net, volume, out=begun, quiet=True).shape == SIZE


def test_a_volume_that_changes_under_way(net: torch.nn.Module) -> None:
    class Restless:
        shape, dtype = (24, 24, 24), np.dtype("float32")

        def __init__(self) -> None:
            self.reads = 0

        def __getitem__(self, index: Any) -> np.ndarray:
            self.reads += 1
            return np.full(self.shape, self.reads > 20, "float32")[index]

    with pytest.raises(ValueError, match="the volume has changed in tile"):
        predict_whole(net, Restless(), tile=Tiles(12, memory=0), quiet=True)  # nothing stored: it is read in each pass


# ---- full disks ------------------------------------------------------------------------------------------------------
FULL = """
    import resource, signal, sys
    import numpy as np
    import torch
    from farfield.streaming import predict_whole
    from helpers.streamed_nets import Hourglass, settled

    net, volume = settled(Hourglass("siamese", 3)), np.random.default_rng(0).random((12, 20, 22), "float32")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    for limit in (int(sys.argv[2]), resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            print(predict_whole(net, volume, tile=(6, 20, 22), out=sys.argv[1], quiet=True).shape)
        except OSError as error:
            print(type(error).__name__, error)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("suffix", "limit"),
    partly([(".npy", 20_000), (".tif", 20_000), (".zarr", 9_500), (".zarr", 1_000)], [(".zarr", 9_500)]),
)
def test_a_full_disk_is_said_and_nothing_is_lost(suffix: str, limit: int, tmp_path: Path) -> None:
    script = textwrap.dedent(FULL)
    command = [sys.executable, "-c", script, str(tmp_path / f"out{suffix}"), str(limit)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()
    assert f"[Errno {errno.EFBIG}] predict_whole: " in first
    assert "fix: " in first
    assert second == str(SIZE)
    assert [each.name for each in tmp_path.iterdir()] == [f"out{suffix}"]


def test_a_disk_without_room_is_noticed_before_anything_runs(
    volume: np.ndarray, net: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r'predict_whole: .*disk .*[\d,]+ bytes .*out\.npy"; fix'):
        predict_whole(net, volume, tile=8, out=tmp_path / "out.npy", quiet=True)
    assert list(tmp_path.iterdir()) == []


# ---- memory ----------------------------------------------------------------------------------------------------------
MEMORY = """
    import sys
    from pathlib import Path
    import numpy as np
    import torch
    torch.set_num_threads(1)
    from farfield.nn import GridAttention
    from farfield.streaming import respond_whole

    def resident(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    row, grid, out = sys.argv[1:]
    layer = GridAttention(8, row, project="qkvo").eval()
    volume = np.load(grid, mmap_mode="r")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = resident("VmRSS")
    found = respond_whole(layer, volume, out=out, quiet=True)
    print(resident("VmHWM") - before, found.shape)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from Linux")
@pytest.mark.parametrize("row", ["siamese", "kronecker_qkv", "factorized_gaussian"])
def test_a_bare_layer_takes_less_than_a_quarter_of_a_gibibyte(row: str, tmp_path: Path) -> None:
    side = 384  # 1.7 GiB in and out; the bound does not grow with the side
    if shutil.disk_usage(tmp_path).free < 8 * 2**30:
        pytest.skip("less than 8 GiB free on the disk")
    grid = np.lib.format.open_memmap(tmp_path / "grid.npy", mode="w+", dtype="float32", shape=(8, side, side, side))
    generator = np.random.default_rng(0)
    for z in range(side):
        grid[:, z] = generator.standard_normal((8, side, side), "float32")
    grid.flush()
    del grid
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(MEMORY),
        row,
        str(tmp_path / "grid.npy"),
        str(tmp_path / "out.npy"),
    ]
    # What is held, and not what glibc keeps of freed memory: its threshold for separate maps grows with what is freed,
    # and then one run in two keeps 0.5 GiB more (docs/performance.md, "Larger than memory").
    held = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, cwd=TESTS, env=held, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Beside what torch and the program take: 16 MiB a tile, and what it is mapped to, read from and written from.
    assert int(done.stdout.split()[0]) < 2**28
