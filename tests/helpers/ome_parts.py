"""An OME-TIFF in two files, for tests: whole, without a part, and with the name of a file elsewhere."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile

AWAY = pytest.mark.parametrize("what", ["missing", "renamed", "moved away"])
ELSEWHERE = pytest.mark.parametrize(
    "told", ["../secret.ome.tif", "{folder}/secret.ome.tif", r"..\secret.ome.tif", "C:secret.tif"]
)

PLANES = np.random.default_rng(0).integers(1, 255, (4, 9, 11)).astype("uint8")


def write_parts(folder: Path, names: tuple[str, ...] = ("m0.ome.tif", "m1.ome.tif"), told: str | None = None) -> Path:
    """Write an OME-TIFF in two files of two planes, of which each tells where all are; `told` for the second."""
    told_names = (names[0], told or names[1])
    owned = [f"urn:uuid:0000000{number}-0000-0000-0000-000000000000" for number in range(2)]
    where = "".join(
        f'<TiffData FirstZ="{z}" IFD="{z % 2}" PlaneCount="1"><UUID FileName="{told_names[z // 2]}">{owned[z // 2]}'
        "</UUID></TiffData>"
        for z in range(4)
    )
    for number, name in enumerate(names):
        xml = (
            f'<?xml version="1.0"?><OME UUID="{owned[number]}"><Image ID="Image:0"><Pixels '
            'ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="11" SizeY="9" SizeZ="4" SizeC="1" SizeT="1">'
            f'<Channel ID="Channel:0:0" SamplesPerPixel="1"/>{where}</Pixels></Image></OME>'
        )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        part = PLANES[2 * number : 2 * number + 2]
        tifffile.imwrite(folder / name, part, photometric="minisblack", description=xml, metadata=None)
    return folder / names[0]


def write_first_part(folder: Path, what: str) -> Path:
    """Write an OME-TIFF in two files, of which the second is not where the first says."""
    path, other = write_parts(folder), folder / "m1.ome.tif"
    if what == "missing":
        other.unlink()
    else:
        other.rename(folder / "m2.ome.tif" if what == "renamed" else folder.parent / "m1.ome.tif")
    return path


def write_few_planes(folder: Path) -> Path:
    """Write four planes that are described as six."""
    xml = tifffile.OmeXml()
    xml.addimage("uint8", (6, 9, 11), (6, 1, 1, 9, 11, 1), axes="ZYX")
    path = folder / "few.ome.tif"
    tifffile.imwrite(path, PLANES, photometric="minisblack", description=xml.tostring(), metadata=None)
    return path


def assert_reads_below_its_folder_alone(read: Callable[[Path], object], told: str, folder: Path) -> None:
    """Assert that a part with the name of a file elsewhere is refused, and that no such file is opened."""
    given = folder / "given"
    write_parts(given)
    told = told.format(folder=folder)
    path = write_parts(given, told=told)
    shutil.copy(given / "m1.ome.tif", folder / "secret.ome.tif")
    files: list[str] = []
    start = tifffile.TiffFile.__init__

    def noted(self: tifffile.TiffFile, file: object, *given: object, **options: object) -> None:
        files.append(str(file))
        start(self, file, *given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tifffile.TiffFile, "__init__", noted)
        with pytest.raises(ValueError, match=rf'it has "{re.escape(told)}" .*parts.*in its folder'):
            read(path)
    assert set(files) == {str(path)}
