"""`farfield predict --nnunet`: a trained model folder of nnU-Net, with its network in tiles."""

from __future__ import annotations

from pathlib import Path

from farfield.cli.values import Bytes, CommandLineError, Device, Size
from farfield.integrations.nnunet import load_nnunet, predict_nnunet
from farfield.streaming import Tiles


def predict_volume(  # noqa: PLR0913  (the options of a command)
    *,
    nnunet: Path,
    input: list[Path],
    output: Path,
    folds: list[str] | None = None,
    checkpoint: str = "checkpoint_final.pth",
    statistics: str = "whole",
    no_mirroring: bool = False,
    tile: Size | None = None,
    tile__memory: Bytes | None = None,
    tile__disk: Bytes | None = None,
    device: Device = "cpu",
    overwrite: bool = False,
) -> None:
    """Predict the labels of a volume by a trained model folder of nnU-Net, whose network runs in tiles.

        farfield predict --nnunet nnUNetTrainer__nnUNetPlans__3d_fullres --input case_0000.nii.gz --output case.nii.gz

    Plans, preprocessing, resampling and export are nnU-Net's own. A command that was killed goes on if it is repeated.

    Args:
        nnunet: The folder with plans.json, dataset.json and a folder for each fold.
        input: The file of a channel; several in the order of dataset.json, or the first one, _0000, alone.
        output: The file of labels that is written.
        folds: A number of a fold, or all; may be given several times. By default all numbers that are there.
        checkpoint: The file of each fold.
        statistics: What norms see: whole, tile or frozen.
        no_mirroring: Without the mean over flips.
        tile: Size of the tiles in the order of the plans' axes; of a tile's statistics by default the patch size.
        tile__memory: Memory for the values of a tile; by default a quarter of what is free.
        tile__disk: Disk space for values that are stored between passes; by default half of what is free.
        device: Device on which the network runs.
        overwrite: Replace the output if it exists.
    """
    if output.exists() and not overwrite:
        raise CommandLineError(f"{output} exists; fix: another path, or --overwrite")
    size = tile[0] if tile is not None and len(tile) == 1 else tile
    tiles = Tiles(size, memory=tile__memory, disk=tile__disk)
    model = load_nnunet(nnunet, folds=folds, checkpoint=checkpoint, device=device)
    mirroring = not no_mirroring
    predict_nnunet(model, input, output, statistics=statistics, mirroring=mirroring, tile=tiles, overwrite=overwrite)
