"""Training images for generative networks, from the same folders as for classification."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from farfield_papers.data.classify import ImageFolders


class RealImages(ImageFolders):
    """Read images from folders, one per class, as `ImageFolders` does; pixels between -1 and 1, some images mirrored.

    `predict` generates samples: a batch holds the numbers of samples, from 0, and no folder is read.

    Args:
        root: The folder, see `ImageFolders`. `predict` does not read it.
        image_size: Height and width of the network's images: the shorter side is resized to it, then the centre is cut.
        batch_size: Images per batch, on each device.
        workers: Loader processes; 0 loads in the main process.
        mirror: Whether a training image is mirrored with probability 1/2, drawn anew in every epoch.
        subset: Number of training images to use, drawn with the same share of each class; None uses all.
        samples: Number of samples that `predict` generates.
        seed: Seed of split and subset.

    Raises:
        FolderError: As `ImageFolders` does.
    """

    def __init__(
        self,
        root: str,
        *,
        image_size: int = 128,
        batch_size: int = 64,
        workers: int = 2,
        mirror: bool = True,
        subset: int | None = None,
        samples: int = 80,
        seed: int = 0,
    ) -> None:
        settings: dict[str, Any] = {"image_size": image_size, "batch_size": batch_size, "workers": workers}
        half = (0.5, 0.5, 0.5)
        super().__init__(root, augmentation="none", subset=subset, seed=seed, colours=(half, half), **settings)
        self.samples = samples
        if mirror:
            self.training_transform = v2.Compose([self.training_transform, v2.RandomHorizontalFlip()])

    def _check_root(self) -> None:
        if self.trainer is None or not self.trainer.predicting:
            super()._check_root()

    def _list_root(self, stage: str) -> None:
        if stage != "predict":
            super()._list_root(stage)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the numbers of the samples."""
        numbers: Any = range(self.samples)
        return self._loader(numbers, num_workers=0, persistent_workers=False)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise images on the device; the numbers of samples stay unchanged."""
        return batch if isinstance(batch, Tensor) else super().on_after_batch_transfer(batch, dataloader_idx)
