"""An OME-TIFF in two files, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tifffile

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
