"""Lightning: train with attention, save, and write a recipe beside; load_lightning.py loads it."""

import lightning
import torch
import torch.nn.functional as F
import torchvision
from common import digits, make
from lightning.pytorch.callbacks import EMAWeightAveraging

from farfield import insert
from farfield.insertion import save_recipe


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.resnet18(num_classes=10)

    def training_step(self, batch):
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


images, labels = digits(32)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=32)
module = Digits()
insert(module.net, ["layer2", "layer3"], make, example=images[:1])
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    callbacks=[EMAWeightAveraging(decay=0.9)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, loader)
trainer.save_checkpoint("last.ckpt")
save_recipe(module, ".")
with torch.no_grad():
    torch.save({"images": images[:4], "output": module.net.eval()(images[:4])}, "saved.pt")
