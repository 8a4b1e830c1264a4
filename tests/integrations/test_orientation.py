"""Heads in any orientation and spacing: MONAI's transforms before `predict_whole`, and Invertd after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farfield.streaming import predict_whole
from helpers.streamed_nets import settled

pytest.importorskip("monai")
data = pytest.importorskip("monai.data")
transforms = pytest.importorskip("monai.transforms")

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
# Left, posterior, superior, of 2 x 1 x 3 mm.
MATRIX = torch.tensor([[-2.0, 0, 0, 40], [0, -1, 0, 30], [0, 0, 3, -20], [0, 0, 0, 1]], dtype=torch.float64)


@pytest.fixture
def scan() -> torch.Tensor:
    numbers = torch.rand(1, 20, 32, 14, generator=torch.Generator().manual_seed(0))
    return data.MetaTensor(numbers, affine=MATRIX)


def test_labels_lie_where_the_scan_does(scan: torch.Tensor) -> None:
    net = settled(nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.ReLU(), nn.Conv3d(4, 2, 1)))
    before = transforms.Compose(
        [transforms.Orientationd("image", "RAS"), transforms.Spacingd("image", (1.5, 1.5, 1.5), mode="bilinear")]
    )
    after = transforms.Invertd("labels", before, orig_keys="image", nearest_interp=True)
    arranged = before({"image": scan})
    whole = net(arranged["image"].as_tensor()[None]).argmax(1)
    labels = predict_whole(net, arranged["image"], tile=16, reduce="argmax", quiet=True)
    assert isinstance(labels, data.MetaTensor)
    torch.testing.assert_close(labels.affine, arranged["image"].affine)
    assert (labels.as_tensor() == whole).float().mean() > 0.999  # rounding decides between scores that are nearly equal
    found = after({**arranged, "labels": labels})["labels"]
    want = after({**arranged, "labels": data.MetaTensor(whole, affine=arranged["image"].affine)})["labels"]
    torch.testing.assert_close(found.affine, MATRIX)
    assert found.shape == scan.shape
    assert (found.as_tensor() == want.as_tensor()).float().mean() > 0.999
