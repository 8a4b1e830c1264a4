"""An output that holds the numbers of an input is refused: tiles would read what others have written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import torch
import zarr
from torch import nn

from farfield.streaming import predict_whole, respond_whole
from farfield.volumes import ImageMetadata, Volume
from helpers.streamed_nets import attention, settled

SIZE = (12, 14)


def blur() -> nn.Module:
    return settled(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)))


def predict(volume: Any, out: Any, **options: Any) -> Any:
    return predict_whole(blur(), volume, tile=(4, 5), out=out, quiet=True, **options)


def numbers() -> np.ndarray:
    return np.random.default_rng(0).random(SIZE, "float32")


def contents(array: Any) -> np.ndarray:
    return array.float().numpy().copy() if isinstance(array, torch.Tensor) else np.array(array[:])


# ---- pairs that share numbers ----------------------------------------------------------------------------------------
def same_array(folder: Path) -> tuple[Any, Any]:
    array = numbers()
    return array, array


def views_that_overlap(folder: Path) -> tuple[Any, Any]:
    whole = np.random.default_rng(0).random((13, 14), "float32")
    return whole[:12], whole[1:]


def reversed_view(folder: Path) -> tuple[Any, Any]:
    array = numbers()
    return array, array[::-1, ::-1]


def tensors(folder: Path) -> tuple[Any, Any]:
    tensor = torch.from_numpy(numbers())
    return tensor, tensor.view(SIZE)


def tensor_and_its_array(folder: Path) -> tuple[Any, Any]:
    array = numbers()
    return torch.from_numpy(array), array


def bfloat16_tensors(folder: Path) -> tuple[Any, Any]:
    tensor = torch.zeros(13, 14, dtype=torch.bfloat16)
    return tensor[1:], tensor[:12]


def memory_maps(folder: Path) -> tuple[Any, Any]:
    np.save(folder / "v.npy", numbers())
    return np.load(folder / "v.npy", mmap_mode="r"), np.load(folder / "v.npy", mmap_mode="r+")


def memory_maps_through_links(folder: Path) -> tuple[Any, Any]:
    np.save(folder / "v.npy", numbers())
    os.link(folder / "v.npy", folder / "hard.npy")
    (folder / "soft.npy").symlink_to(folder / "hard.npy")
    return np.load(folder / "v.npy", mmap_mode="r"), np.load(folder / "soft.npy", mmap_mode="r+")


def memory_maps_at_offsets(folder: Path) -> tuple[Any, Any]:
    np.zeros(14 * 14, "float32").tofile(folder / "v.bin")
    first = np.memmap(folder / "v.bin", "float32", "r", 0, SIZE)
    return first, np.memmap(folder / "v.bin", "float32", "r+", 14 * 4 * 2, SIZE)


def memory_map_and_a_tensor_of_it(folder: Path) -> tuple[Any, Any]:
    np.save(folder / "v.npy", numbers())
    read = np.load(folder / "v.npy", mmap_mode="c")
    return np.asarray(read)[:], torch.from_numpy(np.load(folder / "v.npy", mmap_mode="r+"))


def zarr_twice(folder: Path) -> tuple[Any, Any]:
    array = zarr.create_array(str(folder / "v.zarr"), data=numbers(), chunks=(5, 5))
    return array, zarr.open_array(str(folder / "v.zarr"), mode="r+")


def zarr_through_a_link(folder: Path) -> tuple[Any, Any]:
    array = zarr.create_array(str(folder / "v.zarr"), data=numbers(), chunks=(5, 5))
    (folder / "link.zarr").symlink_to(folder / "v.zarr")
    return array, zarr.open_array(str(folder / "link.zarr"), mode="r+")


def zarr_by_its_group(folder: Path) -> tuple[Any, Any]:
    array = zarr.open_group(str(folder / "v.zarr")).create_array("a", data=numbers())
    return array, zarr.open_array(str(folder / "v.zarr" / "a"), mode="r+")


def zarr_in_memory(folder: Path) -> tuple[Any, Any]:
    store = zarr.storage.MemoryStore()
    array = zarr.create_array(store, data=numbers())
    return array, zarr.open_array(store, mode="r+")


def hdf5_by_two_names(folder: Path) -> tuple[Any, Any]:
    file = h5py.File(folder / "v.h5", "w")
    file["a"] = numbers()
    file["b"] = file["a"]
    return file["a"], file["b"]


def hdf5_of_two_handles(folder: Path) -> tuple[Any, Any]:
    file = h5py.File(folder / "v.h5", "w")
    file.create_dataset("a", data=numbers(), chunks=(5, 5))
    file.flush()
    return file["a"], h5py.File(folder / "v.h5", "r+")["a"]


def hdf5_and_a_virtual_one(folder: Path) -> tuple[Any, Any]:
    file = h5py.File(folder / "v.h5", "w")
    file.create_dataset("a", data=numbers(), chunks=(5, 5))
    layout = h5py.VirtualLayout(SIZE, "float32")
    layout[:] = h5py.VirtualSource(file["a"])
    file.create_virtual_dataset("b", layout)
    return file["b"], file["a"]


def hdf5_and_its_memory_map(folder: Path) -> tuple[Any, Any]:
    with h5py.File(folder / "v.h5", "w") as file:
        file["a"] = numbers()
        offset = file["a"].id.get_offset()
    mapped = np.memmap(folder / "v.h5", "float32", "r+", offset, SIZE)
    return h5py.File(folder / "v.h5", "r")["a"], mapped


SHARED: tuple[Callable[[Path], tuple[Any, Any]], ...] = (
    same_array,
    views_that_overlap,
    reversed_view,
    tensors,
    tensor_and_its_array,
    bfloat16_tensors,
    memory_maps,
    memory_maps_through_links,
    memory_maps_at_offsets,
    memory_map_and_a_tensor_of_it,
    zarr_twice,
    zarr_through_a_link,
    zarr_by_its_group,
    zarr_in_memory,
    hdf5_by_two_names,
    hdf5_of_two_handles,
    hdf5_and_a_virtual_one,
    hdf5_and_its_memory_map,
)


@pytest.mark.parametrize("pair", SHARED, ids=lambda pair: pair.__name__)
def test_an_output_that_is_the_input_is_refused(pair: Callable[[Path], tuple[Any, Any]], tmp_path: Path) -> None:
    volume, out = pair(tmp_path)
    before = contents(out)
    with pytest.raises(ValueError, match=r"predict_whole: out and the volume .*; fix: another out"):
        predict(volume, out)
    np.testing.assert_array_equal(contents(out), before)


# ---- paths -----------------------------------------------------------------------------------------------------------
def tiff_view(path: Path) -> Any:
    tifffile.imwrite(path, numbers(), photometric="minisblack", compression="zlib")
    return zarr.open(tifffile.imread(path, aszarr=True), mode="r")


def tiff_map(path: Path) -> Any:
    tifffile.imwrite(path, numbers(), photometric="minisblack")
    return tifffile.memmap(path, mode="r")


def npy_map(path: Path) -> Any:
    np.save(path, numbers())
    return np.load(path, mmap_mode="r")


def zarr_array(path: Path) -> Any:
    return zarr.create_array(str(path), data=numbers(), chunks=(5, 5))


@pytest.mark.parametrize(
    ("name", "make"), [("v.tif", tiff_view), ("v.tif", tiff_map), ("v.npy", npy_map), ("v.zarr", zarr_array)]
)
@pytest.mark.parametrize("linked", [False, True], ids=["itself", "through a link"])
def test_a_path_that_is_the_inputs_is_refused(
    name: str, make: Callable[[Path], Any], linked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    volume = make(tmp_path / "real" / name)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / ("link" if linked else "real"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=rf'out and the volume are both in ".*real/{name}'):
        predict(volume, name, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_group_that_holds_the_input_is_refused(tmp_path: Path) -> None:
    volume = zarr.open_group(str(tmp_path / "v.zarr")).create_array("a", data=numbers())
    with pytest.raises(ValueError, match="out and the volume are both in"):
        predict(volume, tmp_path / "v.zarr", overwrite=True)
    np.testing.assert_array_equal(volume[:], numbers())


def test_an_input_in_the_folder_of_what_is_unfinished_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.npy.unfinished").mkdir()
    np.save(tmp_path / "out.npy.unfinished" / "out.npy", numbers())
    volume = np.load(tmp_path / "out.npy.unfinished" / "out.npy", mmap_mode="r")
    with pytest.raises(ValueError, match="out and the volume are both in"):
        predict(volume, tmp_path / "out.npy")


# ---- pairs that do not -----------------------------------------------------------------------------------------------
def test_neighbours_are_taken(tmp_path: Path) -> None:
    want = predict(numbers(), None)
    pairs: list[tuple[Any, Any]] = []
    both = np.zeros((2, *SIZE), "float32")
    both[0] = numbers()
    pairs.append((both[0], both[1]))
    between = np.zeros((*SIZE, 2), "float32")
    between[..., 0] = numbers()
    pairs.append((between[..., 0], between[..., 1]))
    both.tofile(tmp_path / "both.bin")
    maps = [np.memmap(tmp_path / "both.bin", "float32", "r+", offset, SIZE) for offset in (0, 4 * 12 * 14)]
    pairs.append((maps[0], maps[1]))
    file = h5py.File(tmp_path / "v.h5", "w")
    file["a"], file["b"] = numbers(), np.zeros(SIZE, "float32")
    pairs.append((file["a"], file["b"]))
    group = zarr.open_group(str(tmp_path / "v.zarr"))
    pairs.append((group.create_array("a", data=numbers()), group.create_array("b", shape=SIZE, dtype="float32")))
    for volume, out in pairs:
        np.testing.assert_array_equal(predict(volume, out)[:], want)


def test_each_input_of_a_bare_layer_is_looked_at() -> None:
    layer, grid, context = settled(attention("siamese")), torch.randn(6, 8, 9), torch.randn(6, 8, 9)
    mask, valid = torch.ones(8, 9, dtype=torch.bool), torch.ones(8, 9, dtype=torch.bool)
    inputs = {"context": context, "mask": mask, "context_mask": valid}
    outs = {
        "grid": grid,
        "context": context,
        "mask": mask.expand(6, 8, 9),
        "context_mask": valid.expand(6, 8, 9),
    }
    for name, out in outs.items():
        with pytest.raises(ValueError, match=f"respond_whole: out and the {name} are both in the same memory"):
            respond_whole(layer, grid, **inputs, tile=(4, 4), out=out, quiet=True)
        labelled = {key: Volume(each, ImageMetadata("CYX"[-each.ndim :])) for key, each in inputs.items()}
        with pytest.raises(ValueError, match=f"respond_whole: out and the {name} are both in the same memory"):
            respond_whole(layer, grid, **labelled, tile=(4, 4), out=out, quiet=True)
