"""RealImages: pixels between -1 and 1, some mirrored; what is predicted are numbers and needs no folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farfield_papers.data.generate import RealImages
from farfield_papers.data.readers.images import FolderError
from papers_helpers.made_images import make_root


def test_images_lie_between_minus_one_and_one_and_half_are_mirrored(tmp_path: Path) -> None:
    data = RealImages(str(make_root(tmp_path)), image_size=16, batch_size=24, workers=0)
    data.prepare_data()
    data.setup("fit")
    raw, labels = next(iter(data.val_dataloader()))
    images, _ = data.on_after_batch_transfer([raw, labels], 0)
    assert images.shape == (12, 3, 16, 16)
    torch.testing.assert_close(images, raw / 127.5 - 1)
    drawn = torch.stack([data.parts["train"][0][0] for _ in range(64)])
    same = (drawn == drawn[0]).flatten(1).all(1)
    assert torch.equal(drawn[~same][0], drawn[0].flip(-1))
    assert 16 < int(same.sum()) < 48
    plain = RealImages(str(tmp_path), image_size=16, workers=0, mirror=False)
    plain.setup("fit")
    assert all(torch.equal(plain.parts["train"][0][0], plain.parts["train"][0][0]) for _ in range(8))


def test_what_is_drawn_needs_no_folder() -> None:
    data = RealImages("nowhere", samples=7, batch_size=4, workers=0)
    data.setup("predict")
    batches = list(data.predict_dataloader())
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6]]
    assert data.on_after_batch_transfer(batches[0], 0) is batches[0]
    with pytest.raises(FolderError, match="nowhere"):
        data.prepare_data()
