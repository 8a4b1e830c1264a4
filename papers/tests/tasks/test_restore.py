"""Restore: it learns, losses and schedule are CARE's, and whole stacks come back with their own grey levels."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from farfield import ShapeError
from farfield.nn import GridAttention
from farfield.volumes import ImageMetadata, Volume, open_volume
from farfield_papers import models
from farfield_papers.tasks.metrics import care_metrics
from farfield_papers.tasks.restore import Restore, laplace_loss
from farfield_papers.tasks.restore_stack import find_grey_levels, restore
from helpers.partly import partly
from papers_helpers.made_stacks import made_pair

warnings.filterwarnings("ignore", module="lightning")


class Made(LightningDataModule):
    """Tensors as a data module."""

    def __init__(self, grid: Tensor, target: Tensor) -> None:
        super().__init__()
        self.samples = TensorDataset(grid, target)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.samples, 4)

    val_dataloader = train_dataloader


def trainer(folder: Path, epochs: int, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(max_epochs=epochs, default_root_dir=folder, enable_checkpointing=False, **quiet, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "operator", "below"),
    # The noisy input as the answer has a loss of 0.4, and with the best scale of log(2 · 0.4) + 1 = 0.78.
    partly([("mae", "siamese", 0.1), ("laplace", "averaged", 0.0)], [("laplace", "averaged", 0.0)]),
)
def test_a_network_overfits_one_batch(tmp_path: Path, loss: Any, operator: str, below: float) -> None:
    torch.manual_seed(0)
    network = models.unet_care(operator, first_channels=8, depth=1, probabilistic=loss == "laplace")
    clean = torch.rand(4, 1, 4, 8, 8).round()
    module = Restore(network, learning_rate=2e-3, loss=loss)
    fit = trainer(tmp_path, 250, limit_val_batches=0)
    fit.fit(module, Made(clean + 0.5 * torch.randn(clean.shape), clean))
    assert float(fit.callback_metrics["train/loss_epoch"]) < below


def test_losses_by_hand(tmp_path: Path) -> None:
    mean, scale, target = torch.tensor([0.5, 2.0]), torch.tensor([0.1, 3.0]), torch.tensor([0.0, -1.0])
    expected = [abs(0.5) / 0.1 + math.log(0.1) + math.log(2), 3 / 3 + math.log(3) + math.log(2)]
    assert float(laplace_loss(mean, scale, target)) == pytest.approx(sum(expected) / 2)
    # The density whose logarithm that is.
    density = torch.distributions.Laplace(mean, scale).log_prob(target)
    torch.testing.assert_close(laplace_loss(mean, scale, target), -density.mean())
    grid, clean = torch.randn(4, 1, 4, 4), torch.randn(4, 1, 4, 4)
    [measured] = trainer(tmp_path, 1).validate(Restore(nn.Conv2d(1, 1, 1)), Made(grid, clean), verbose=False)
    assert set(measured) == {"val/loss", "val/psnr"}
    assert math.isfinite(measured["val/psnr"])


def test_a_probabilistic_network_trained_without_its_scales(tmp_path: Path) -> None:
    network = models.unet_care(spatial_dims=2, first_channels=2, probabilistic=True)
    grid, clean = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)
    [measured] = trainer(tmp_path, 1).validate(Restore(network), Made(grid, clean), verbose=False)
    assert measured["val/loss"] == pytest.approx(float((network(grid)[:, :1] - clean).abs().mean().detach()), rel=1e-5)


class Rates(Restore):
    """Note the learning rate of each epoch, where the validation loss never falls."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.rates = [*getattr(self, "rates", []), self.trainer.optimizers[0].param_groups[0]["lr"]]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", 1.0)


def test_the_rate_is_halved_where_the_loss_has_not_fallen(tmp_path: Path) -> None:
    module = Rates(nn.Conv2d(1, 1, 1), learning_rate=1.0, patience=2)
    trainer(tmp_path, 8).fit(module, Made(torch.zeros(4, 1, 4, 4), torch.zeros(4, 1, 4, 4)))
    # As in Keras: the first epoch is the best, and after `patience` others that are no better the next is one too many.
    assert module.rates == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.25]


def test_cares_settings_are_the_default() -> None:
    settings = Restore(nn.Identity()).hparams
    assert (settings["learning_rate"], settings["loss"], settings["factor"], settings["patience"]) == (
        4e-4,
        "mae",
        0.5,
        10,
    )
    assert settings["betas"] == (0.9, 0.999)
    assert "network" not in settings


def test_grids_that_are_not_the_targets_are_refused_in_the_first_batch(tmp_path: Path) -> None:
    data = Made(torch.zeros(4, 1, 8, 8), torch.zeros(4, 1, 4, 8))
    with pytest.raises(ShapeError, match=r"target +\(4, 1, 4, 8\)"):
        trainer(tmp_path, 1).fit(Restore(nn.Conv2d(1, 1, 1)), data)
    data = Made(torch.zeros(4, 1, 8, 8), torch.zeros(4, 1, 8, 8))
    with pytest.raises(ShapeError, match=r'"laplace" needs a scale[\s\S]*probabilistic true'):
        trainer(tmp_path, 1).fit(Restore(nn.Conv2d(1, 1, 1), loss="laplace"), data)


# ---- whole stacks ----------------------------------------------------------------------------------------------------
def awake(net: nn.Module) -> nn.Module:
    """Give attention's output maps, zero at first, values."""
    for module in net.modules():
        if isinstance(module, GridAttention):
            nn.init.normal_(module.output.weight, std=0.3)
    return net.eval()


def restored_by_hand(network: nn.Module, stack: np.ndarray, multiples: tuple[int, ...]) -> np.ndarray:
    """The five steps, one after the other, in one piece."""
    low, high = np.percentile(stack, (2, 99.8))
    grid = (stack.astype(np.float32) - low) / (high - low)
    short = [-side % multiple for side, multiple in zip(stack.shape, multiples, strict=True)]
    padded = np.pad(grid, [(lack // 2, lack - lack // 2) for lack in short], "reflect")
    with torch.no_grad():
        restored = network(torch.from_numpy(padded.astype(np.float32))[None, None])[0, 0].numpy()
    kept = [slice(lack // 2, lack // 2 + side) for lack, side in zip(short, stack.shape, strict=True)]
    return restored[tuple(kept[-restored.ndim :])] * (high - low) + low


@pytest.mark.parametrize("tile", partly([None, 8, [4, 12, 16]], [8]))
@pytest.mark.parametrize("size", [(9, 30, 22), (1, 7, 7), (3, 5, 2)])
@pytest.mark.parametrize("operator", partly([None, "siamese", "kronecker_qkv"], ["kronecker_qkv"]))
def test_a_stack_is_normalised_padded_restored_and_brought_back(
    operator: Any, size: tuple[int, ...], tile: Any
) -> None:
    network = awake(models.unet_care(operator, first_channels=4, depth=2))
    stack = np.random.default_rng(0).poisson(40, size).astype(np.uint16)
    expected = restored_by_hand(network, stack, (4, 4, 4))
    found = restore(network, stack, tile=tile)
    assert found.dtype == np.float32
    # float32 sums in another order over tiles; grey levels of a stack whose range is some tens.
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.long
def test_images_and_projections_are_restored_too() -> None:
    image = np.random.default_rng(0).poisson(40, (17, 22)).astype(np.float32)
    network = awake(models.unet_care("siamese", spatial_dims=2, first_channels=4))
    np.testing.assert_allclose(restore(network, image), restored_by_hand(network, image, (4, 4)), rtol=1e-5)
    stack = np.random.default_rng(0).poisson(40, (5, 17, 22)).astype(np.uint16)
    network = awake(models.unet_projection("siamese", first_channels=4))
    found = restore(network, stack)
    assert found.shape == (17, 22)
    np.testing.assert_allclose(found, restored_by_hand(network, stack, (1, 16, 16)), rtol=1e-5)


@pytest.mark.parametrize("axes", ["ZYXC", "ZCYX", "ZYXS", "ZCYXS"])
@pytest.mark.parametrize("build", [models.unet_care, models.unet_projection])
def test_channels_are_where_the_letters_say(build: Any, axes: str) -> None:
    stack = np.random.default_rng(0).poisson(40, (2, 5, 17, 22)).astype(np.uint16)
    network = awake(build("siamese", first_channels=4))
    own = axes if axes.count("C") + axes.count("S") == 1 else axes.replace("C", "")
    given = np.transpose(stack, ["CZYX".index(letter) for letter in own.replace("S", "C")])
    given = given if own == axes else given[:, None]
    found = restore(network, Volume(given, ImageMetadata(axes)))
    np.testing.assert_array_equal(found, restore(network, Volume(stack, ImageMetadata("CZYX"))))


@pytest.mark.parametrize("build", [models.unet_care, models.unet_projection])
def test_channels_are_restored_each_by_itself(build: Any, tmp_path: Path) -> None:
    stacks = np.stack([(factor * np.random.default_rng(factor).poisson(40, (5, 17, 22))) for factor in (1, 9)])
    stacks, network = stacks.astype(np.uint16), awake(build("siamese", first_channels=4))
    metadata = ImageMetadata("CZYX", {"Y": 0.2, "X": 0.1}, {"Y": "micrometer", "X": "micrometer"}, {}, ("DAPI", "GFP"))
    found = restore(network, Volume(stacks, metadata), out=tmp_path / "out.ome.tif")
    for channel, stack in zip(found[:], stacks, strict=True):
        alone = restore(network, stack)
        np.testing.assert_allclose(channel, alone, atol=1e-5 * np.abs(alone).max())
    np.testing.assert_array_equal(restore(network, stacks), found[:])
    written = open_volume(tmp_path / "out.ome.tif").metadata
    assert written == dataclasses.replace(metadata, axes="CZYX" if found.ndim == 4 else "CYX")


@pytest.mark.parametrize("build", [models.unet_care, models.unet_projection])
def test_a_tensor_is_restored_as_an_array_and_keeps_its_matrix(build: Any) -> None:
    network = build("siamese", first_channels=4).eval()
    stack = torch.rand(5, 12, 14)
    expected = restore(network, stack.numpy(), tile=8)
    found = restore(network, stack, tile=8)
    assert type(found) is Tensor
    np.testing.assert_array_equal(found.numpy(), expected)
    data = pytest.importorskip("monai.data")
    labelled = restore(network, data.MetaTensor(stack[None], affine=torch.diag(torch.tensor([3.0, 2, 1, 1]))), tile=8)
    np.testing.assert_array_equal(np.asarray(labelled)[0], expected)
    if build is models.unet_care:
        assert labelled.affine.diagonal().tolist() == [3, 2, 1, 1]


def test_means_are_what_a_probabilistic_network_restores() -> None:
    stack = np.random.default_rng(0).poisson(40, (4, 8, 8)).astype(np.uint8)
    network = models.unet_care(first_channels=4, probabilistic=True).eval()
    plain = models.unet_care(first_channels=4).eval()
    plain.load_state_dict(network.state_dict(), strict=False)
    np.testing.assert_array_equal(restore(network, stack), restore(plain, stack))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32"])
def test_grey_levels_are_percentiles(dtype: str) -> None:
    stack = np.random.default_rng(0).gamma(1.0, 40.0, (7, 13, 11)).clip(0, 255).astype(dtype)
    assert find_grey_levels(stack) == pytest.approx(tuple(np.percentile(stack, (2, 99.8))), rel=1e-6)
    assert find_grey_levels(stack, (0, 100)) == (stack.min(), stack.max())


@pytest.mark.parametrize(
    ("stack", "text"),
    [
        (np.full((4, 8, 8), 7, np.uint16), "as good as constant: its percentiles 2.0 and 99.8 are both 7"),
        (
            np.where(np.arange(256) == 3, np.nan, 1.0).reshape(4, 8, 8),
            "numbers that are not finite, at positions 0:4 × 0:8 × 0:8",
        ),
        (np.ones((8, 8)), "restores grids of 3 spatial dims, the stack has 2: (8, 8)"),
    ],
)
def test_stacks_that_cannot_be_restored_are_refused(stack: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        restore(models.unet_care(first_channels=2).eval(), stack)


@pytest.mark.parametrize("name", ["restored.tif", "restored.zarr"])
@pytest.mark.parametrize("build", [models.unet_care, models.unet_projection])
def test_files_hold_what_arrays_would_and_are_not_replaced(tmp_path: Path, build: Any, name: str) -> None:
    noisy, _ = made_pair(0, (4, 16, 32))
    network = build(first_channels=2).eval()
    path = tmp_path / name
    written = restore(network, noisy, out=path)
    np.testing.assert_array_equal(written[:], restore(network, noisy))
    with pytest.raises(FileExistsError, match=r"exists; fix: another path"):
        restore(network, noisy, out=path)
    restore(network, noisy, out=path, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    with pytest.raises(ValueError, match=r"must end in one of \.npy, .*\.zarr"):
        restore(network, noisy, out=tmp_path / "restored.png")


def test_tests_measure_whole_stacks_for_each_condition(tmp_path: Path) -> None:
    class Pairs(LightningDataModule):
        def test_dataloader(self) -> DataLoader:
            pairs = [(*made_pair(seed), f"{seed}.tif", condition) for seed, condition in ((0, "a"), (1, "a"), (2, "b"))]
            return DataLoader(pairs, batch_size=None, collate_fn=lambda sample: sample)

    network = models.unet_care(first_channels=2).eval()
    [measured] = trainer(tmp_path, 1).test(Restore(network), Pairs(), verbose=False)
    each = [care_metrics(clean, restore(network, noisy)) for noisy, clean in map(made_pair, range(3))]
    before = [care_metrics(clean, noisy) for noisy, clean in map(made_pair, range(3))]
    for metric in ("psnr", "ssim", "nrmse"):
        values = [getattr(one, metric) for one in each]
        assert measured[f"test/{metric}"] == pytest.approx(np.mean(values), rel=1e-5)
        assert measured[f"test/a/{metric}"] == pytest.approx(np.mean(values[:2]), rel=1e-5)
        assert measured[f"test/b/{metric}"] == pytest.approx(values[2], rel=1e-5)
    assert measured["test/b/psnr_before"] == pytest.approx(before[2].psnr, rel=1e-5)


def test_a_stack_is_never_overwritten_by_its_restored_twin(tmp_path: Path) -> None:
    path = tmp_path / "stack.tif"
    tifffile.imwrite(path, np.random.default_rng(0).random((4, 9, 11), "float32"), compression="zlib")
    (tmp_path / "link").symlink_to(tmp_path)
    before, stack = path.read_bytes(), tifffile.imread(path)
    for output in (path, tmp_path / "link" / "stack.tif"):
        module = Restore(models.unet_care("siamese", first_channels=4), output=str(output), overwrite=True)
        with pytest.raises(FileExistsError, match=r"would replace .*stack\.tif, which is read; nothing"):
            module.predict_step((stack, str(path), "stack.tif"), 0)
    assert path.read_bytes() == before
