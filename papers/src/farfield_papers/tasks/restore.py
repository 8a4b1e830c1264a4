"""Restoration of images and volumes: the losses, CARE's schedule, and the measures on whole stacks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from farfield._checks import shape_error
from farfield._outputs import check_not_input, output_path
from farfield._refusals import door, put_name
from farfield.streaming import Tiles
from farfield_papers.tasks.metrics import EPSILON, care_metrics
from farfield_papers.tasks.restore_stack import restore
from farfield_papers.tasks.training_task import TrainingTask
from farfield_papers.tasks.writers.predictions import list_inputs

Loss = Literal["mae", "laplace"]


class Restore(TrainingTask):
    """Train a network that restores noisy or blurred grids; defaults are the settings of CARE.

    `mae: mean |μ - y|`, `laplace: mean(|μ - y| / σ + log σ + log 2)`

    Adam; the learning rate is halved when `val/loss` has not fallen for ten epochs. Grids for `fit` are normalised;
    whole stacks, in `test` and `predict`, have the grey levels of the microscope and are restored by
    `tasks.restore_stack.restore`. Logged: `train/loss`, `val/loss`, `val/psnr` (of the patches, scaled and shifted as
    in CARE), `learning_rate`, and for `test` PSNR, SSIM and NRMSE, over all stacks and for each condition, such as
    `test/psnr` and `test/<condition>/psnr`; for the stacks before restoration, `test/psnr_before` and so on.

    Args:
        network: Any module from grids `(batch, channels, *size)` to such grids, or to means and scales, concatenated
            along the channels.
        learning_rate: Learning rate at first.
        loss: `"mae"`, or `"laplace"` for a probabilistic network.
        betas: Betas of Adam.
        factor: Factor of the learning rate when `val/loss` does not fall.
        patience: Number of epochs to wait for `val/loss` to fall.
        output: Output path of `predict`: .tif, .ome.tif, .zarr or .ome.zarr, with the voxel size of the input; for
            several stacks, or without a suffix, it is a folder. None writes `<name>-restored.tif` beside each stack,
            and `<name>-restored.zarr` beside a zarr folder; names with `.ome` keep that.
        overwrite: Whether existing files are replaced; "skip" keeps them and continues with the other stacks.
        tile: Size of the tiles that are restored at a time, and trained on where data are whole stacks: one number or
            one per spatial dim, or `streaming.Tiles`, which also has memory and disk (--tile.size 64 --tile.disk 20G);
            None for the largest that memory allows. The result does not depend on it.

    Raises:
        ShapeError: In the first batch, if the network's outputs do not have the shape of the targets, or with the loss
            "laplace" have no scales.

    Reference: SAN §4.5, Weigert et al. 2018.

    Example:
        >>> module = Restore(nn.Conv3d(1, 1, 3, padding=1))
        >>> module(torch.zeros(2, 1, 4, 8, 8)).shape
        torch.Size([2, 1, 4, 8, 8])
    """

    # Whether a prediction that was stopped goes on where it was, when the same command runs again.
    resumes = True
    not_saved = ("output", "overwrite", "tile")

    def __init__(
        self,
        network: nn.Module,
        *,
        learning_rate: float = 4e-4,
        loss: Loss = "mae",
        betas: tuple[float, float] = (0.9, 0.999),
        factor: float = 0.5,
        patience: int = 10,
        output: str | None = None,
        overwrite: Literal["skip"] | bool = False,
        tile: Tiles | list[int] | int | None = None,
    ) -> None:
        super().__init__(network)
        self.overwrite, self.tile = overwrite, tile
        # `client` or `part` of `restore`, where several processes work, as the command line sets them.
        self.processes: dict[str, Any] = {}
        self.output = None if output is None else Path(output)

    def forward(self, grid: Float[Tensor, "b c *n"]) -> Float[Tensor, "b p *m"]:
        """Return restored grids; for a probabilistic network means and scales, concatenated along the channels."""
        return self._run(grid)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        return self._train_on(*batch)

    def on_train_epoch_start(self) -> None:
        """Log the learning rate of the epoch."""
        self._log_rate()

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        grid, target = batch
        output = self(grid)
        loss = self._compute_loss(output, grid, target)
        values = {"val/loss": loss, "val/psnr": scaled_psnr(output[:, : target.shape[1]].float(), target)}
        self.log_dict(values, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=len(target))

    def test_step(self, batch: tuple[Any, Any, str, str], batch_idx: int) -> None:
        """Restore a whole stack, and measure it and the stack before restoration against the truth."""
        stack, truth, _, condition = batch
        after = care_metrics(truth, restore(self.network, stack, tile=self.tile))._asdict()
        # The truth of a projection is an image, which does not have the size of the stack.
        before = care_metrics(truth, stack)._asdict() if stack.shape == truth.shape else {}
        values = {name: value for name, value in after.items() if not math.isnan(value)}
        values |= {f"{name}_before": value for name, value in before.items() if not math.isnan(value)}
        for place in ("test", f"test/{condition}"):
            logged = {f"{place}/{name}": value for name, value in values.items()}
            self.log_dict(logged, on_epoch=True, sync_dist=True, batch_size=1)

    def predict_step(self, batch: tuple[Any, str, str], batch_idx: int) -> str:
        """Restore a whole stack, write it, and return the path as a text, which states if the stack was skipped."""
        stack, path, name = batch
        output = self.place(Path(path), name)
        if output.exists() and self.overwrite == "skip":
            return f"{output} (skipped: it exists)"
        if output.exists() and not self.overwrite:
            raise FileExistsError(
                f"farfield predict: {output} exists; fix: another --output, --overwrite true to replace it, or "
                "--overwrite skip to go on with the other stacks."
            )
        inputs = list_inputs(self.trainer) if self._trainer is not None else []
        with door("farfield predict"):
            check_not_input(output, [Path(path), *inputs])
        output.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"tile": self.tile, "out": output, "overwrite": self.overwrite is True}
        done = restore(self.network, stack, **options, quiet=False, **self.processes) is not None
        return str(output) if done else f"{output} (a part: the others, then --part reduce)"

    def place(self, path: Path, name: str) -> Path:
        """Return the output path of the stack at `path`; `name` is its path below the folder that is predicted."""
        if self.processes:  # which write whole chunks, each in a file
            path, name = path.with_suffix(".zarr"), str(Path(name).with_suffix(".zarr"))
        if self.output is None:
            ome = ".ome" if path.name.lower().endswith((".ome.tif", ".ome.tiff", ".ome.zarr")) else ""
            suffix = f"{ome}.zarr" if path.is_dir() or self.processes else f"{ome}.tif"
            return path.with_name(f"{path.stem.removesuffix(ome)}-restored{suffix}")
        several = self._trainer is not None and sum(self.trainer.num_predict_batches) > 1
        return output_path(self.output, name) if several or not self.output.suffix else self.output

    def configure_optimizers(self) -> Any:
        """Return Adam, and the schedule, which depends on `val/loss`."""
        settings = self.hparams
        optimizer = torch.optim.Adam(
            self.network.parameters(), lr=settings["learning_rate"], betas=tuple(settings["betas"])
        )
        schedule = ReduceLROnPlateau(
            optimizer, factor=settings["factor"], patience=settings["patience"], threshold=0.0, threshold_mode="abs"
        )
        # Without a validation loss, as with limit_val_batches=0, the learning rate is constant.
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/loss", "interval": "epoch", "strict": False},
        }

    def _compute_loss(self, output: Tensor, grid: Tensor, target: Tensor) -> Tensor:
        output = output.float()
        channels, laplace = target.shape[1], self.hparams["loss"] == "laplace"
        if output.shape[2:] != target.shape[2:] or output.shape[1] not in (channels, 2 * channels):
            problem = "the network must return grids of the shape of the targets."
            fix = "another network or other data; for a projection, whose targets are images, use unet_projection."
            raise put_name("Restore", shape_error(problem, fix, grid=grid, target=target, output=output))
        if laplace and output.shape[1] == channels:
            problem = 'the loss "laplace" needs a scale for each value.'
            fix = "build the network with probabilistic=True (--model.network.probabilistic true), or loss=mae."
            raise put_name("Restore", shape_error(problem, fix, target=target, output=output))
        mean = output[:, :channels]
        return laplace_loss(mean, output[:, channels:], target) if laplace else (mean - target).abs().mean()


def laplace_loss(mean: Tensor, scale: Tensor, target: Tensor) -> Tensor:
    """Return the negative log-likelihood of a Laplace distribution, `mean(|μ - y| / σ + log σ + log 2)`."""
    return ((mean - target).abs() / scale + scale.log() + math.log(2)).mean()


def scaled_psnr(restored: Float[Tensor, "b c *n"], target: Float[Tensor, "b c *n"]) -> Tensor:
    """Return the mean PSNR, in dB, of a batch with targets from 0 to 1, each grid shifted and scaled to its target."""
    # Without percentiles of the truth: patches are already normalised by those of their stack.
    restored, target = (grid.detach().flatten(1).double() for grid in (restored, target))
    restored, target = (grid - grid.mean(1, keepdim=True) for grid in (restored, target))
    factor = (restored * target).sum(1, keepdim=True) / (restored.square().sum(1, keepdim=True) + EPSILON)
    error = (target - factor * restored).square().mean(1)
    # At most 100 dB, which bounds the PSNR of constant patches.
    return (-10 * error.clamp(min=1e-10).log10()).mean()
