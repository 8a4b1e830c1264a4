"""MONAI's networks by `WholeInferer`: equal to the network on the whole, with meta data, in bundles, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.environments import make_environment, run_in
from helpers.partly import partly

monai = pytest.importorskip("monai")
nets = pytest.importorskip("monai.networks.nets")
MetaTensor = pytest.importorskip("monai.data").MetaTensor
WholeInferer = pytest.importorskip("farfield.integrations.monai").WholeInferer

pytestmark = pytest.mark.filterwarnings("ignore::Warning")
WIDE, ODD = (64, 96), (75, 92)
# Network -> how it is built, and a multiple of the sizes that it takes: 1 where it takes all.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "UNet": (lambda: nets.UNet(2, 1, 2, (4, 8, 16), (2, 2), num_res_units=1), 1),
    "BasicUNet": (lambda: nets.BasicUNet(2, 1, 2, (4, 4, 8, 8, 16, 4)), 1),
    "FlexibleUNet": (lambda: nets.FlexibleUNet(1, 2, "efficientnet-b0", spatial_dims=2), 1),
    "HighResNet": (lambda: nets.HighResNet(2, 1, 2), 1),
    "DenseNet121": (lambda: nets.DenseNet121(spatial_dims=2, in_channels=1, out_channels=2, block_config=(2, 2)), 1),
    "AutoEncoder": (lambda: nets.AutoEncoder(2, 1, 1, (4, 8), (2, 2)), 1),
    "DynUNet": (lambda: nets.DynUNet(2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2]), 4),
    "AttentionUnet": (lambda: nets.AttentionUnet(2, 1, 2, (4, 8, 16), (2, 2)), 4),
    "SegResNetDS": (lambda: nets.SegResNetDS(2, 8, 1, 2, blocks_down=(1, 2, 2)), 4),
    "SegResNet": (lambda: nets.SegResNet(2, 8, in_channels=1, out_channels=2), 8),
    "VNet": (lambda: nets.VNet(spatial_dims=2, in_channels=1, out_channels=2), 16),
    "MedNeXt": (lambda: nets.MedNeXt(2, 8, 1, 2), 16),
    "SwinUNETR": (lambda: nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2), 32),
}
REFUSED = {
    "AutoencoderKL": (
        lambda: nets.AutoencoderKL(2, 1, 1, (1, 1), (8, 8), (False, False), norm_num_groups=4),
        "draws random numbers",
    ),
}


def unetr() -> nn.Module:
    """Return a UNETR of one size."""
    options = {"feature_size": 4, "hidden_size": 24, "mlp_dim": 48, "num_heads": 2}
    return nets.UNETR(1, 2, WIDE, spatial_dims=2, **options).eval()


# What has little in common: residual units, deep supervision, gates, dense blocks; windows of attention take longer.
@pytest.mark.long
@pytest.mark.parametrize("name", partly(NETWORKS, ("UNet", "DynUNet", "AttentionUnet", "DenseNet121")))
def test_networks_are_equal_to_the_whole(name: str) -> None:
    build, multiple = NETWORKS[name]
    net, grid = build().eval(), torch.rand(2, 1, *WIDE)
    with torch.no_grad():
        want = net(grid)
        torch.testing.assert_close(WholeInferer(tile=32)(grid, net), want, rtol=1e-4, atol=2e-5)
    grid = torch.rand(1, 1, *ODD)
    if multiple == 1:
        torch.testing.assert_close(WholeInferer(tile=32)(grid, net), net(grid).detach(), rtol=1e-4, atol=2e-5)
        return
    with pytest.raises(ValueError, match=f'fix: a size that {multiple} × {multiple} divides, or pad="reflect"'):
        WholeInferer(tile=32)(grid, net)
    # The fix, followed.
    (low, high), (left, right) = ((-each % multiple // 2, -(each // -multiple) * multiple - each) for each in ODD)
    padded = F.pad(grid, (left, right - left, low, high - low), mode="reflect")
    with torch.no_grad():
        want = net(padded)[..., low : low + ODD[0], left : left + ODD[1]]
    torch.testing.assert_close(WholeInferer(tile=32, pad="reflect")(grid, net), want, rtol=1e-4, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    build, text = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=text):
        WholeInferer(tile=32)(torch.rand(1, 1, *WIDE), build().eval())


@pytest.mark.long
def test_a_network_of_one_size() -> None:
    net, grid = unetr(), torch.rand(1, 1, *WIDE)
    torch.testing.assert_close(WholeInferer(tile=32)(grid, net), net(grid).detach(), rtol=1e-4, atol=2e-5)
    with pytest.raises(ValueError, match=r"size, got \(80, 80\); fix: SlidingWindowInferer\(roi_size"):
        WholeInferer(tile=32, pad="reflect")(torch.rand(1, 1, 80, 80), net)
    assert monai.inferers.SlidingWindowInferer(roi_size=WIDE)(torch.rand(1, 1, 80, 100), net).shape == (1, 2, 80, 100)


@pytest.mark.long
def test_meta_data_labels_and_devices() -> None:
    net = NETWORKS["DynUNet"][0]().eval()
    matrix = torch.diag(torch.tensor([2.0, 3.0, 4.0, 1.0]))
    batch = MetaTensor(torch.rand(2, 1, *WIDE), affine=matrix.repeat(2, 1, 1), meta={"filename_or_obj": ["a", "b"]})
    scores = WholeInferer(tile=32, device="cpu")(batch, net)
    assert isinstance(scores, MetaTensor)
    assert scores.meta["filename_or_obj"] == ["a", "b"]
    assert torch.equal(scores.affine, batch.affine)
    torch.testing.assert_close(scores.as_tensor(), net(batch.as_tensor()).detach(), rtol=1e-4, atol=2e-5)
    labels = WholeInferer(tile=32, reduce="argmax")(batch, net)
    assert labels.shape == (2, 1, *WIDE)
    assert labels.dtype == torch.uint8
    plain = WholeInferer(tile=32)(batch.as_tensor(), nn.DataParallel(net))
    assert type(plain) is Tensor


def test_further_arguments_and_several_outputs() -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.InstanceNorm2d(4)

        def forward(self, grid: Tensor, gain: Tensor, *, shift: float = 0.0) -> dict[str, Tensor]:
            features = self.norm(self.first(grid)) * gain + shift
            return {"features": features, "mean": features.mean(1, keepdim=True)}

    net, grid, gain = Conditional().eval(), torch.rand(1, 1, *WIDE), torch.tensor(3.0)
    found, want = WholeInferer(tile=32)(grid, net, gain, shift=2.0), net(grid, gain, shift=2.0)
    assert list(found) == ["features", "mean"]
    torch.testing.assert_close(found["mean"], want["mean"].detach(), rtol=1e-4, atol=2e-5)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got function; fix: .*module"):
        WholeInferer(tile=32)(grid, lambda volume: net(volume, gain))
    both, gains = torch.rand(2, 1, *WIDE), torch.rand(2, 4, 1, 1)
    with pytest.raises(ValueError, match="each of the 2 volumes"):
        WholeInferer(tile=32)(both, net, gains)
    one_by_one = [WholeInferer(tile=32)(a[None], net, b[None])["mean"] for a, b in zip(both, gains, strict=True)]
    torch.testing.assert_close(torch.cat(one_by_one), net(both, gains)["mean"].detach(), rtol=1e-4, atol=2e-5)


def test_mixed_precision() -> None:
    net, grid = NETWORKS["DynUNet"][0]().eval(), torch.rand(1, 1, *WIDE)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        want, found = net(grid).float(), WholeInferer(tile=32)(grid, net).float()
    exact = net(grid).detach()
    assert float((found - exact).abs().max()) < 2 * float((want - exact).abs().max())


# ---- bundles ---------------------------------------------------------------------------------------------------------
def write_bundle(folder: Path) -> Tensor:
    """Write a bundle with weights and two volumes of NIfTI; return the labels of the first by the network itself."""
    nibabel = pytest.importorskip("nibabel")
    for name in ("configs", "models", "volumes"):
        (folder / name).mkdir()
    network = {
        "_target_": "UNet",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
        "channels": [4, 8],
        "strides": [2],
        "norm": "instance",
    }
    net = nets.UNet(**{name: value for name, value in network.items() if name != "_target_"}).eval()
    torch.save(net.state_dict(), folder / "models" / "model.pt")
    volumes = [np.random.default_rng(each).random((24, 20, 16), "float32") for each in range(2)]
    for index, volume in enumerate(volumes):
        image = nibabel.Nifti1Image(volume, np.diag([0.5, 0.5, 2.0, 1.0]))
        nibabel.save(image, folder / "volumes" / f"{index}.nii.gz")
    inference = {
        "bundle_root": str(folder),
        "device": "$torch.device('cpu')",
        "imports": ["$import torch", "$import glob"],
        "network_def": network,
        "network": "$@network_def.to(@device)",
        "datalist": "$[{'image': each} for each in sorted(glob.glob(@bundle_root + '/volumes/*.nii.gz'))]",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [{"_target_": "LoadImaged", "keys": "image", "ensure_channel_first": True}],
        },
        "dataset": {"_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1},
        "inferer": {"_target_": "farfield.integrations.monai.WholeInferer", "tile": [16, 16, 16]},
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
                {
                    "_target_": "SaveImaged",
                    "keys": "pred",
                    "output_dir": str(folder / "eval"),
                    "separate_folder": False,
                    "print_log": False,
                },
            ],
        },
        "checkpoint": "$torch.load(@bundle_root + '/models/model.pt')",
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
        },
        "initialize": ["$@network.load_state_dict(@checkpoint)"],
        "run": ["$@evaluator.run()"],
    }
    (folder / "configs" / "inference.json").write_text(json.dumps(inference))
    (folder / "configs" / "metadata.json").write_text(json.dumps({"version": "0.1.0"}))
    with torch.no_grad():
        return net(torch.from_numpy(volumes[0])[None, None])[0].argmax(0)


def test_the_parts_of_a_bundle(tmp_path: Path) -> None:
    labels = write_bundle(tmp_path)
    parser = monai.bundle.ConfigParser()
    parser.read_config(tmp_path / "configs" / "inference.json")
    parser.get_parsed_content("initialize")
    net = parser.get_parsed_content("network").eval()
    [first, _] = parser.get_parsed_content("dataloader")
    scores = parser.get_parsed_content("inferer")(first["image"], net)
    assert torch.equal(scores[0].argmax(0).as_tensor(), labels)
    np.testing.assert_array_equal(scores.affine[0].diagonal(), [0.5, 0.5, 2.0, 1.0])


@pytest.mark.slow
def test_a_bundle_from_end_to_end(tmp_path: Path) -> None:
    python = make_environment("monai")
    if python is None:
        pytest.skip("pip cannot install pytorch-ignite")
    labels = write_bundle(tmp_path)
    files = "config_file='configs/inference.json', meta_file='configs/metadata.json'"
    words = ["-c", f"import monai.bundle; monai.bundle.run({files})"]
    done = run_in(python, words, tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    nibabel: Any = pytest.importorskip("nibabel")
    written = sorted((tmp_path / "eval").glob("*.nii.gz"))
    assert len(written) == 2
    image = nibabel.load(written[0])
    np.testing.assert_array_equal(np.asarray(image.dataobj).squeeze(), labels)
    np.testing.assert_array_equal(image.affine.diagonal(), [0.5, 0.5, 2.0, 1.0])
