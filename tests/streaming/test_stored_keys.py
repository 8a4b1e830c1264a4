"""Keys and values of softmax attention that are stored on disk: the same result, resumed, checked and removed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from farfield.streaming.stored_grids import StoredFile
from farfield.streaming.stored_keys import StoredKeys
from torch import Tensor, nn

from farfield.streaming import Tiles, plan_whole, predict_whole, resume, tiling
from farfield.streaming.summaries import MergedKeys
from helpers.streamed_nets import relative, settled


class Middle(nn.Module):
    """A stride, softmax attention of heads over all positions, and an upsampling."""

    def __init__(self, spatial_dims: int = 2, heads: int = 2) -> None:
        super().__init__()
        kind, back = {2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}[spatial_dims]
        self.before, self.after = kind(1, 8, 2, stride=2), back(8, 1, 2, stride=2)
        self.project, self.heads = nn.Linear(8, 24), heads

    def forward(self, grid: Tensor) -> Tensor:
        grid = self.before(grid)
        query, key, value = self.project(grid.flatten(2).mT).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        response = F.scaled_dot_product_attention(3 * query, key, value)
        return self.after(grid + response.transpose(1, 2).flatten(2).mT.reshape(grid.shape))


VOLUMES = {
    dims: torch.randn(2, 1, *size, generator=torch.Generator().manual_seed(0))
    for dims, size in {2: (34, 46), 3: (10, 18, 22)}.items()
}
# Keys and values of 8 channels in float32, at half of each axis of two samples.
BYTES = {dims: 2 * 8 * 2 * 4 * grid[0].numel() // 2**dims for dims, grid in VOLUMES.items()}


@pytest.mark.parametrize("dims", [2, 3])
def test_the_result_is_that_of_the_whole_and_the_plan_is_what_happens(
    dims: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, grid, tiles = settled(Middle(dims)), VOLUMES[dims], Tiles(8, disk=BYTES[dims])
    in_memory = predict_whole(net, grid, tile=8, quiet=True)
    with torch.no_grad():
        assert relative(in_memory, net(grid)) < 1e-5
    plan = plan_whole(net, grid.shape, tile=tiles)
    assert plan.disk_bytes == BYTES[dims]
    assert f"keys and values of Middle, {BYTES[dims]:,} bytes, are stored on disk" in str(plan)

    def unused(*_: Any) -> None:
        raise AssertionError("keys are added in memory")

    monkeypatch.setattr(MergedKeys, "add", unused)
    sizes, respond = [], StoredKeys.whole

    def watched(keys: StoredKeys, device: torch.device) -> StoredKeys:
        sizes.extend(each.stat().st_size for each in tmp_path.glob("*.unfinished/*.keys"))
        return respond(keys, device)

    monkeypatch.setattr(StoredKeys, "whole", watched)
    # The same blocks in the same order: the same bytes as in memory.
    got = predict_whole(net, grid.numpy(), tile=tiles, out=tmp_path / "out.npy", quiet=True)
    np.testing.assert_array_equal(got, in_memory)
    assert sizes == [BYTES[dims]]
    assert [each.name for each in tmp_path.iterdir()] == ["out.npy"]
    torch.testing.assert_close(predict_whole(net, grid, tile=tiles, quiet=True), in_memory, rtol=0, atol=0)


def test_a_budget_that_is_too_small_leaves_them_in_memory() -> None:
    plan = plan_whole(settled(Middle()), VOLUMES[2].shape, tile=Tiles(8, disk=BYTES[2] - 1))
    assert not plan.keys
    assert plan.disk_bytes == 0


def test_what_does_not_fit_in_memory_is_refused_and_the_fix_works(monkeypatch: pytest.MonkeyPatch) -> None:
    net, grid = settled(Middle()), VOLUMES[2]
    want = predict_whole(net, grid, tile=8, quiet=True)
    monkeypatch.setattr(tiling, "free_bytes", lambda device: BYTES[2])
    with pytest.raises(ValueError, match=r"the summary of softmax attention at Middle is its grid") as refused:
        predict_whole(net, grid, tile=8, quiet=True)
    [disk] = re.findall(r"fix: tile=Tiles\(…, disk=(\d+)\), which stores keys and values on disk", str(refused.value))
    torch.testing.assert_close(
        predict_whole(net, grid, tile=Tiles(8, disk=int(disk)), quiet=True), want, rtol=0, atol=0
    )


def test_numbers_that_are_not_finite_are_refused() -> None:
    grid = VOLUMES[2].clone()
    grid[1, 0, 20, 9] = torch.nan
    with pytest.raises(ValueError, match=r"Middle: its input is not finite in the tile at \(8, 4\)"):
        predict_whole(settled(Middle()), grid, tile=Tiles(8, disk=BYTES[2]), quiet=True)


class Stopping:
    """A volume whose reading ends with an error, as after a kill."""

    def __init__(self, left: int) -> None:
        self.array, self.left = VOLUMES[2].numpy(), left
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        self.left -= 1
        if not self.left:
            raise InterruptedError
        return self.array[index]


# 30 tiles: within the pass that summarizes, and within the one that writes.
@pytest.mark.parametrize("reads", [12, 41])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_prediction_resumes_and_a_damaged_file_is_made_again(
    reads: int, damaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, out, tiles = settled(Middle()), tmp_path / "out.npy", Tiles(8, disk=BYTES[2])
    monkeypatch.setattr(resume, "SHARE", 0)
    want = predict_whole(net, VOLUMES[2], tile=8, quiet=True)
    with pytest.raises(InterruptedError):
        predict_whole(net, Stopping(reads), tile=tiles, out=out, quiet=True)
    [file] = tmp_path.glob("*.unfinished/*.keys")
    writes, write = [], StoredFile.write

    def counted(stored: StoredFile, index: int, block: Tensor) -> None:
        writes.append(index)
        write(stored, index, block)

    monkeypatch.setattr(StoredFile, "write", counted)
    if damaged:
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
        with pytest.warns(UserWarning, match="does not hold any more the keys and values that were stored"):
            got = predict_whole(net, VOLUMES[2].numpy(), tile=tiles, out=out, quiet=True)
    else:
        got = predict_whole(net, VOLUMES[2].numpy(), tile=tiles, out=out, quiet=True)
    # Tiles that were stored are not computed again.
    assert writes == list(range(0 if damaged else min(reads - 1, 30), 30))
    np.testing.assert_array_equal(got, want)
    assert [each.name for each in tmp_path.iterdir()] == ["out.npy"]


def test_a_file_that_is_damaged_while_passes_run_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, whole = settled(Middle()), StoredKeys.whole

    def damaging(keys: StoredKeys, device: torch.device) -> StoredKeys:
        content = bytearray(keys.file.path.read_bytes())
        content[-1] ^= 1
        keys.file.path.write_bytes(content)
        return whole(keys, device)

    monkeypatch.setattr(StoredKeys, "whole", damaging)
    text = r'predict_whole: ".*0\.keys" has changed since it was written, in tile 29; it stores "Middle" .*; fix'
    with pytest.raises(ValueError, match=text):
        predict_whole(net, VOLUMES[2].numpy(), tile=Tiles(8, disk=BYTES[2]), out=tmp_path / "out.npy", quiet=True)
