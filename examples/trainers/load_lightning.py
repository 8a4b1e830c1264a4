"""Lightning: load what train_lightning.py saved in a new process, export it to ONNX, and compare."""

import lightning
import torch
import torchvision
from common import compare

from farfield.insertion import apply_recipe


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.resnet18(num_classes=10)


module = Digits.load_from_checkpoint("last.ckpt", strict=False, map_location="cpu").eval()
apply_recipe(module, ".")
compare(module.net, torch.load("saved.pt"))
