"""`farfield predict --bioimageio`: a package of bioimage.io over a volume that may be larger than memory."""

from __future__ import annotations

from pathlib import Path

from farfield._outputs import check_not_input
from farfield.cli.values import Bytes, Device, Index, Size
from farfield.integrations.bioimageio import open_package
from farfield.streaming import Tiles, predict_whole
from farfield.volumes import open_volume


def predict_package(  # noqa: PLR0913  (each is an option)
    *,
    bioimageio: Path,
    input: list[Path],
    output: Path,
    tile__size: Size | None = None,
    tile__halo: Size | None = None,
    tile__memory: Bytes | None = None,
    tile__disk: Bytes | None = None,
    pad: str | None = None,
    channel: Index | None = None,
    device: Device = "cpu",
    trust: bool = False,
    overwrite: bool = False,
) -> None:
    """Run a package of bioimage.io over a volume, tile by tile, with the result of the whole.

        farfield predict --bioimageio unet.zip --input embryo.tif --output nuclei.zarr

    Preprocessing and postprocessing are those of the package, with statistics of the whole volume. A command that was
    interrupted goes on if it is repeated.

    Args:
        bioimageio: The package: a folder, a .zip file, or its rdf.yaml.
        input: The volume; given once for each input of the package, in its order.
        output: The file that is written, .tif, .zarr or .npy.
        tile__size: Size of the tiles; by default the largest that memory allows.
        tile__halo: Positions that operations without a rule read around their own.
        tile__memory: Memory for the values of a tile.
        tile__disk: Disk space for values that are stored between passes.
        pad: How the volume is padded to sizes that the network takes: reflect, replicate or constant.
        channel: Index of the channel that is read; by default all.
        device: Device on which the network runs.
        trust: Run code of Python that the package holds or names, such as the architecture of a state dict.
        overwrite: Replace an output that exists.
    """
    check_not_input(output, [bioimageio, *input])
    package = open_package(bioimageio, trust=trust, device=device)
    volume = package.preprocess(*(open_volume(path, channel=channel) for path in input))
    size, halo = (given[0] if given and len(given) == 1 else given for given in (tile__size, tile__halo))
    tiles = Tiles(size, halo, tile__memory, tile__disk)
    predict_whole(
        package.network, volume, tile=tiles, pad=pad, reduce=package.postprocess, out=output, overwrite=overwrite
    )
