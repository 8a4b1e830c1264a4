"""Odd files: what open_volume returns is what the format's own library reads, or it is refused by name."""

from __future__ import annotations

import gzip
import itertools
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr

from farfield.volumes import open_volume

STACK = np.random.default_rng(0).integers(0, 100, (3, 12, 14)).astype("uint8")
COLOUR = np.random.default_rng(0).integers(0, 100, (12, 14, 3)).astype("uint8")
# What it writes at a path, and what is read: an array, or a pattern of why it is refused.
Case = tuple[str, Callable[[Path], Any]]


def tiff(array: np.ndarray, **options: Any) -> Callable[[Path], np.ndarray]:
    def write(path: Path) -> np.ndarray:
        tifffile.imwrite(path, array, **options)
        expected = tifffile.imread(path)
        return (
            np.moveaxis(expected, -1, 0)
            if options.get("photometric") == "rgb" and expected.shape[-1] == 3
            else expected
        )

    return write


def tiffs() -> dict[str, Case]:
    """Files of many dtypes, byte orders, layouts and compressions."""
    cases = {}
    for dtype, order in itertools.product(
        ("uint8", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64"), "<>"
    ):
        cases[f"tiff of {dtype}{order}"] = (
            "a.tif",
            tiff(STACK.astype(dtype), byteorder=order, photometric="minisblack"),
        )
    for big, tile, packed in itertools.product((False, True), (None, (16, 16)), (None, "zlib")):
        options = {"bigtiff": big, "tile": tile, "compression": packed, "metadata": {"axes": "ZYX"}}
        cases[f"tiff {options}"] = ("a.tif", tiff(STACK, photometric="minisblack", **options))
        cases[f"colours {options}"] = ("a.tif", tiff(COLOUR, photometric="rgb", **options | {"metadata": None}))
    for rows in (1, 5, 12):
        cases[f"strips of {rows} rows"] = ("a.tiff", tiff(STACK, rowsperstrip=rows, photometric="minisblack"))
        cases[f"packed strips of {rows} rows"] = (
            "a.TIF",
            tiff(STACK, rowsperstrip=rows, compression="zlib", predictor=True, photometric="minisblack"),
        )
    cases["one pixel"] = ("a.tif", tiff(STACK[0, :1, :1]))
    cases["one row"] = ("a.tif", tiff(STACK[0, :1]))
    cases["planes apart"] = ("a.tif", tiff(STACK, photometric="rgb", planarconfig="separate"))
    cases["booleans"] = ("a.tif", tiff(STACK[0] > 50))
    cases["complex"] = ("a.tif", tiff(STACK[0].astype("complex64")))
    return cases


def cut(write: Callable[[Path], Any], share: float, text: str) -> Callable[[Path], str]:
    """The same file without its end."""

    def write_cut(path: Path) -> str:
        write(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        return text

    return write_cut


# The library of a suffix, and its extra.
LIBRARIES = {
    ".h5": ("h5py", "hdf5"),
    ".nii": ("nibabel", "nifti"),
    ".gz": ("nibabel", "nifti"),
    ".mrc": ("mrcfile", "mrc"),
}


def overwrite(content: bytes, text: str) -> Callable[[Path], str]:
    def write(path: Path) -> str:
        for library, extra in [LIBRARIES[path.suffix]] if path.suffix in LIBRARIES else []:
            pytest.importorskip(library, reason=f'needs the extra "{extra}"')
        path.write_bytes(content)
        return text

    return write


def npy(array: np.ndarray) -> Callable[[Path], np.ndarray]:
    def write(path: Path) -> np.ndarray:
        np.save(path, array)
        return np.load(path)

    return write


def objects(path: Path) -> str:
    np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    return "Python objects"


def chunked(array: np.ndarray, **options: Any) -> Callable[[Path], np.ndarray]:
    def write(path: Path) -> np.ndarray:
        made = zarr.create_array(str(path), shape=array.shape, dtype=array.dtype, **options)
        made[:2] = array[:2]  # the rest is what fills it
        return np.asarray(made[:])

    return write


def group(attributes: dict[str, Any], text: str) -> Callable[[Path], str]:
    def write(path: Path) -> str:
        made = zarr.create_group(str(path), attributes=attributes)
        made.create_array("0", data=STACK)
        return text

    return write


def image(**changed: Any) -> dict[str, Any]:
    axes = [{"name": letter, "type": "space"} for letter in "zyx"]
    level = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1.0, 1.0, 1.0]}]}
    return {"ome": {"version": "0.5", "multiscales": [{"axes": axes, "datasets": [level], **changed}]}}


def zipped(entries: dict[str, bytes], text: str, packed: bool = False) -> Callable[[Path], str]:
    def write(path: Path) -> str:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
            for name, content in entries.items():
                archive.writestr(name, content)
        return text

    return write


def zipped_folder(path: Path) -> np.ndarray:
    """A folder that was zipped as such."""
    zarr.create_array(str(path.with_name("inner.zarr")), data=STACK)
    with zipfile.ZipFile(path, "w") as archive:
        for each in path.with_name("inner.zarr").rglob("*"):
            archive.write(each, each.relative_to(path.parent))
    return STACK


def hdf5(make: Callable[[Any], Any]) -> Callable[[Path], Any]:
    def write(path: Path) -> Any:
        h5py = pytest.importorskip("h5py", reason='needs the extra "hdf5"')
        with h5py.File(path, "w") as file:
            return make(file)

    return write


def link(file: Any) -> str:
    import h5py

    file["inner"] = h5py.ExternalLink("/etc/passwd", "/")
    file.create_dataset("a", data=STACK)
    file.create_dataset("b", data=STACK)
    return "it has the arrays"


def virtual(source: str, name: str, text: str) -> Callable[[Any], Any]:
    """A virtual dataset, whose source is beside it: others, an external one, or in what a link leads to."""

    def make(file: Any) -> Any:
        import h5py

        file["inner"] = h5py.ExternalLink("other.h5", "/")
        file["soft"] = h5py.SoftLink("/inner/raw")
        file["group/same"] = STACK
        file.create_dataset("bytes", shape=STACK.shape, dtype="uint8", external="beside")
        for made, (other, inside) in {"chain": (".", "inner/raw"), "raw": (source, name)}.items():
            layout = h5py.VirtualLayout(shape=STACK.shape, dtype="uint8")
            layout[:] = h5py.VirtualSource(other, inside, shape=STACK.shape)
            file.create_virtual_dataset(made, layout)
        return text or STACK

    return make


VIRTUAL = {
    "elsewhere": ("../elsewhere.h5", "raw", '"raw" has parts in "../elsewhere.h5"'),
    "beside it": ("other.h5", "raw", '"raw" has parts in "other.h5"'),
    "by a link": (".", "inner/raw", '"inner" is a link to "/"'),
    "by a link from the root": (".", "/./inner/raw", '"inner" is a link to "/"'),
    "by a soft link": (".", "soft", '"soft" is a link to "/inner/raw"'),
    "by another virtual one": (".", "chain", '"raw" has parts in "chain", which is virtual too; fix: copy it'),
    "in a circle": (".", "raw", '"raw" has parts in "raw", which is virtual too; fix: copy it'),
    "outside": (".", "bytes", '"bytes" is in "beside"; fix: '),
    "itself": (".", "group/same", ""),
}


def external(file: Any) -> str:
    file.create_dataset("raw", shape=STACK.shape, dtype="uint8", external="/etc/hostname")
    return '"raw" is in "/etc/hostname"; fix: '


def nifti(array: np.ndarray, **header: Any) -> Callable[[Path], np.ndarray]:
    def write(path: Path) -> np.ndarray:
        nibabel = pytest.importorskip("nibabel", reason='needs the extra "nifti"')
        made = nibabel.Nifti1Image(array.T, np.eye(4))
        if header:
            made.header.set_slope_inter(**header)
        nibabel.save(made, path)
        return np.asarray(nibabel.load(path).dataobj).T

    return write


def mrc(array: np.ndarray, stacked: bool = False) -> Callable[[Path], np.ndarray]:
    def write(path: Path) -> np.ndarray:
        mrcfile = pytest.importorskip("mrcfile", reason='needs the extra "mrc"')
        with mrcfile.new(path) as file:
            file.set_data(array)
            if stacked:
                file.set_image_stack()
            return file.data.copy()

    return write


def planes(**files: np.ndarray) -> Callable[[Path], Any]:
    def write(path: Path) -> Any:
        path.mkdir()
        for name, array in files.items():
            tifffile.imwrite(path / f"{name}.tif", array)
        (path / ".hidden.tif").write_bytes(b"no image")
        (path / "notes.txt").touch()
        same = len({(each.shape, each.dtype) for each in files.values()}) == 1
        return np.stack(list(files.values())) if same else "planes of one size and dtype"

    return write


def with_file(name: str, content: bytes, text: str) -> Callable[[Path], str]:
    def write(path: Path) -> str:
        path.mkdir()
        (path / name).write_bytes(content)
        return text

    return write


def lazy_zarr(content: str, text: str) -> Callable[[Path], str]:
    return with_file("zarr.json", content.encode(), f"as zarr: .*{text}")


# What is said of a text in the place of a file.
NO_FILES = {
    ".tif": "not a TIFF file",
    ".svs": "not a TIFF file",
    ".npy": "pickled",
    ".zip": "not a zip file",
    ".h5": "signature not found",
    ".nii": "file type",
    ".nii.gz": "Not a gzipped file",
    ".mrc": "not an MRC file",
    ".xyz": "is of no format that is read, such as",
}
CUT_TIFF = r"corrupted IFD structure|ends after \d+ of \d+ bytes or more"
CUT_MRC = "enough bytes for MRC header|mmap length is greater than file size"


CASES: dict[str, Case] = {
    **tiffs(),
    **{
        f"tiff, {share:.0%} of it": ("a.tif", cut(tiff(STACK), share, CUT_TIFF))
        for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
    },
    **{
        f"packed tiff, {share:.0%} of it": ("a.tif", cut(tiff(STACK, compression="zlib"), share, CUT_TIFF))
        for share in (0.1, 0.3, 0.5, 0.7, 0.9)
    },
    **{
        f"npy, {share:.0%} of it": ("a.npy", cut(npy(STACK), share, "EOF: reading|mmap length"))
        for share in (0.01, 0.1, 0.5, 0.99)
    },
    **{
        f"nifti, {share:.0%} of it": ("a.nii", cut(nifti(STACK), share, r"file type|ends after \d+ of \d+ bytes"))
        for share in (0.1, 0.5, 0.99)
    },
    **{
        f"mrc, {share:.0%} of it": ("a.mrc", cut(mrc(STACK.astype("int16")), share, CUT_MRC))
        for share in (0.1, 0.5, 0.99)
    },
    **{
        f"hdf5, {share:.0%} of it": (
            "a.h5",
            cut(hdf5(lambda file: file.create_dataset("a", data=STACK)), share, "truncated file"),
        )
        for share in (0.1, 0.5, 0.9)
    },
    **{
        f"no {suffix}": (f"a{suffix}", overwrite(b"hello, this is a text\n" * 60, text))
        for suffix, text in NO_FILES.items()
    },
    "empty tiff": ("a.tif", overwrite(b"", "not a TIFF file")),
    "empty npy": ("a.npy", overwrite(b"", "No data left in file")),
    "fortran order": ("a.npy", npy(np.asfortranarray(STACK))),
    "big-endian npy": ("a.npy", npy(STACK.astype(">u2"))),
    "npy of halves": ("a.npy", npy(STACK.astype("float16"))),
    "a pickle": ("a.npy", objects),
    "zarr of F": ("a.zarr", chunked(STACK, order="F", zarr_format=2)),
    "zarr with gaps": ("a.zarr", chunked(STACK, chunks=(1, 5, 5), fill_value=7)),
    "zarr of one chunk": ("a.zarr", chunked(STACK, chunks=(3, 12, 14))),
    "zarr of big-endian": ("a.zarr", chunked(STACK.astype(">u2"), zarr_format=2)),
    "zarr, sharded": ("a.zarr", chunked(STACK, chunks=(1, 6, 7), shards=(2, 12, 14))),
    "zarr, not compressed": ("a.zarr", chunked(STACK, compressors=None)),
    "zarr without its suffix": ("a", chunked(STACK)),
    "no json": ("a.zarr", lazy_zarr("{", "property name")),
    "a json of something else": ("a.zarr", lazy_zarr("[1, 2]", "'list' object")),
    "a codec of another": (
        "a.zarr",
        lazy_zarr(
            '{"zarr_format": 3, "node_type": "array", "shape": [4], "data_type": "uint8", "fill_value": 0, '
            '"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}}, '
            '"chunk_key_encoding": {"name": "default"}, '
            '"codecs": [{"name": "bytes"}, {"name": "no such codec"}]}',
            "no such codec",
        ),
    ),
    "no image": ("a.zarr", group({}, "is a group of zarr that is no image")),
    "images that are none": ("a.zarr", group({"ome": {"multiscales": [3]}}, "as zarr: 'int' object")),
    "axes without names": ("a.zarr", group(image(axes=[{}, {}, {}]), "as zarr: 'name'")),
    "a level that is not there": ("a.zarr", group(image(datasets=[{"path": "9"}]), 'names "9" as its level 0')),
    "a level above its folder": ("a.zarr", group(image(datasets=[{"path": "../a"}]), r"'\.\./a' is invalid")),
    "zipped folder": ("a.zip", zipped_folder),
    "zip without zarr": ("a.zip", zipped({"a.txt": b"text"}, "No group found")),
    "zip that grows": ("a.zip", zipped({"zarr.json": bytes(10**7)}, "grows from .* to 10,000,000 bytes", packed=True)),
    "hdf5 of one array": ("a.h5", hdf5(lambda file: file.create_dataset("inner/a", data=STACK)[:])),
    "hdf5 of several": ("a.h5", hdf5(link)),
    "hdf5 without arrays": (
        "a.h5",
        hdf5(lambda file: str(file.create_dataset("a", data=[1, 2])) and "it has no arrays"),
    ),
    **{f"hdf5, virtual, {name}": ("a.h5::raw", hdf5(virtual(*made))) for name, made in VIRTUAL.items()},
    "hdf5 by a link": ("a.h5::inner/raw", hdf5(virtual(".", "chain", '"inner" is a link to "/"'))),
    "hdf5 outside": ("a.h5", hdf5(external)),
    "nifti with a slope": ("a.nii", nifti(STACK, slope=2.0, inter=3.0)),
    "packed nifti with a slope": ("a.nii.gz", nifti(STACK, slope=2.0, inter=3.0)),
    "nifti of a plane": ("a.nii", nifti(STACK[0])),
    "gzip of a text": ("a.nii.gz", overwrite(gzip.compress(b"hello" * 100), "file type")),
    "mrc of an image": ("a.mrc", mrc(STACK[0].astype("float32"))),
    "mrc of images": ("a.mrc", mrc(STACK.astype("int16"), stacked=True)),
    "planes": ("planes", planes(a9=STACK[0], a10=STACK[1])),
    "planes of two sizes": ("planes", planes(a1=STACK[0], a2=STACK[1, :5])),
    "planes of two dtypes": ("planes", planes(a1=STACK[0], a2=STACK[1].astype("uint16"))),
    "planes that are stacks": ("planes", lambda path: planes(a1=np.zeros((5, 12, 14)))(path) is None or "is no plane"),
    "a plane that is a text": ("planes", with_file("a.tif", b"no image", '"a.tif": not a TIFF file')),
    "an empty folder": ("planes", with_file(".hidden", b"", "it has no zarr array and no images; fix: ")),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_odd_files_are_right_or_refused_by_name(name: str, tmp_path: Path) -> None:
    file, write = CASES[name]
    path = tmp_path / file.partition("::")[0]
    expected = write(path)
    if isinstance(expected, str):
        with pytest.raises((ValueError, OSError)) as caught:
            open_volume(tmp_path / file)
        assert re.search(expected, str(caught.value))
        assert str(path) in str(caught.value)
        assert str(caught.value).startswith("open_volume: ")
        return
    volume = open_volume(tmp_path / file)
    assert volume.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")
    np.testing.assert_array_equal(np.asarray(volume), expected)


def write_packed_nifti(path: Path, shape: tuple[int, ...], length: int, before: bytes = b"") -> None:
    """A packed NIfTI file of a shape, with some bytes of zeros in place of its numbers."""
    nibabel = pytest.importorskip("nibabel", reason='needs the extra "nifti"')
    header = nibabel.Nifti1Header()
    header.set_data_dtype("uint8")
    header.set_data_shape(shape)
    header["magic"], header["vox_offset"] = b"n+1", 352 + len(before)
    with gzip.open(path, "wb") as file:
        file.write(header.binaryblock + (b"\1\0\0\0" if before else bytes(4)) + before)
        for _ in range(length // 2**20):
            file.write(bytes(2**20))
        file.write(bytes(length % 2**20))


def test_an_extension_of_a_packed_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    large = 2**27
    write_packed_nifti(tmp_path / "a.nii.gz", (4, 5, 6), large + 120, struct.pack("<ii", large, 6))
    tracemalloc.start()
    open_volume(tmp_path / "a.nii.gz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < large / 8


def test_a_packed_file_that_states_more_than_it_can_hold(tmp_path: Path) -> None:
    write_packed_nifti(tmp_path / "a.nii.gz", (32000, 32000, 32000), 1000)
    with pytest.raises(ValueError, match="ends after"):
        open_volume(tmp_path / "a.nii.gz")
    # One that can hold it, and does.
    write_packed_nifti(tmp_path / "b.nii.gz", (100, 100, 100), 10**6)
    assert not open_volume(tmp_path / "b.nii.gz")[:].any()
    # One that could, and does not, is noticed when it is read.
    write_packed_nifti(tmp_path / "c.nii.gz", (100, 100, 100), 10**6 - 1)
    with pytest.raises(OSError, match="999999"):
        open_volume(tmp_path / "c.nii.gz")[:]


def test_a_nifti_whose_numbers_are_elsewhere(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason='needs the extra "nifti"')
    header = nibabel.Nifti1Header()
    header.set_data_shape((3, 4, 5))
    header["magic"] = b"ni1"
    (tmp_path / "a.nii").write_bytes(header.binaryblock + bytes(1000))
    with pytest.raises(ValueError, match="; fix: "):
        open_volume(tmp_path / "a.nii")


@pytest.mark.parametrize("kind", ["Nifti1Image", "Nifti2Image"])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_nifti_is_read_as_by_its_library(kind: str, order: str, suffix: str, tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason='needs the extra "nifti"')
    matrix = np.array([[2.0, 0.1, 0, 3], [0, 1.5, 0, 4], [0, 0, 0.5, 5], [0, 0, 0, 1]])
    image = getattr(nibabel, kind)(STACK.T.astype(f"{order}i2"), matrix)
    image = type(image)(image.dataobj, matrix, image.header.as_byteswapped(order))
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"of the scanner" * 100))
    nibabel.save(image, tmp_path / f"a{suffix}")
    read, volume = nibabel.load(tmp_path / f"a{suffix}"), open_volume(tmp_path / f"a{suffix}")
    assert len(read.header.extensions) == 1
    np.testing.assert_array_equal(volume[:], np.asarray(read.dataobj).T)
    np.testing.assert_array_equal(volume.metadata.matrix("XYZ"), read.affine)
    assert tuple(volume.metadata.spacing[letter] for letter in "XYZ") == tuple(map(float, read.header.get_zooms()))
