"""What trains networks elsewhere trains them on wholes: Lightning, Accelerate, several processes, MONAI's trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn

from farfield import WholeNetwork
from helpers import trained_wholes

STEPS = 2


def train_untiled(steps: int = STEPS) -> dict[str, Tensor]:
    """The parameters after steps of the network itself on a batch of both volumes."""
    network, (grids, labels) = trained_wholes.network(), trained_wholes.volumes()
    optimizer = torch.optim.SGD(network.parameters(), 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(network(grids), labels).backward()
        optimizer.step()
    return network.state_dict()


def is_trained(state: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
    """As the network itself is: three bits of its dtype for each step, of numbers of about one."""
    tolerance = 8 * STEPS * torch.finfo(dtype).eps * 100
    for name, want in train_untiled().items():
        torch.testing.assert_close(state[name].to(want), want, rtol=tolerance, atol=tolerance, msg=name)


def test_a_module_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = WholeNetwork(trained_wholes.network(), tile=6)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.5)

    module = Module()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, default_root_dir=tmp_path, enable_model_summary=False, **options
    )
    pairs = list(zip(*trained_wholes.volumes(), strict=True))
    trainer.fit(module, torch.utils.data.DataLoader(pairs, batch_size=2))
    is_trained(module.network.state_dict())


def test_accelerate_accumulates_gradients_of_wholes() -> None:
    accelerate = pytest.importorskip("accelerate")
    network = trained_wholes.network()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    whole, optimizer = accelerator.prepare(WholeNetwork(network, tile=6), torch.optim.SGD(network.parameters(), 0.5))
    grids, labels = trained_wholes.volumes()
    for step in range(2 * STEPS):
        with accelerator.accumulate(whole):
            loss = F.cross_entropy(whole(grids[step % 2 : step % 2 + 1]), labels[step % 2 : step % 2 + 1])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(whole.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
    is_trained(network.state_dict())


def test_two_processes_have_the_gradients_of_both_volumes(tmp_path: Path) -> None:
    multiprocessing.spawn(trained_wholes.train, args=(2, str(tmp_path)), nprocs=2)
    is_trained(torch.load(tmp_path / "state.pt"))


@pytest.mark.parametrize("name", ["DiceLoss", "DiceCELoss", "GeneralizedDiceLoss", "FocalLoss", "TverskyLoss"])
@pytest.mark.parametrize("is_inside", [False, True], ids=["outside", "inside"])
def test_losses_of_monai(name: str, is_inside: bool) -> None:
    losses = pytest.importorskip("monai.losses")
    options = {} if name == "FocalLoss" else {"softmax": True}
    loss = getattr(losses, name)(to_onehot_y=True, **options)
    net, (grids, labels) = trained_wholes.network(), trained_wholes.volumes()
    other = copy.deepcopy(net)
    loss(other(grids), labels[:, None]).backward()
    whole = WholeNetwork(net, tile=6, loss=loss if is_inside else None)
    (whole(grids, labels[:, None]) if is_inside else loss(whole(grids), labels[:, None])).backward()
    for (path, one), two in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-10, atol=1e-12, msg=path)


def test_the_trainer_of_monai() -> None:
    pytest.importorskip("ignite")
    engines = pytest.importorskip("monai.engines")
    network, (grids, labels) = trained_wholes.network(), trained_wholes.volumes()
    batch = {"image": grids, "label": labels}
    trainer = engines.SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=STEPS,
        train_data_loader=[batch],
        network=WholeNetwork(network, tile=6),
        optimizer=torch.optim.SGD(network.parameters(), 0.5),
        loss_function=nn.CrossEntropyLoss(),
    )
    trainer.run()
    is_trained(network.state_dict())
