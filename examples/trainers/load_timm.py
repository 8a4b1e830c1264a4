"""timm: load what train_timm.py saved in a new process, export it to ONNX, and compare."""

import timm
import torch
from common import compare

from farfield.insertion import apply_recipe

small = {"img_size": 32, "patch_size": 4, "depth": 2, "embed_dim": 48, "num_classes": 10}
nets = {"resnet10t": timm.create_model("resnet10t", num_classes=10)}
nets["vit"] = timm.create_model("vit_tiny_patch16_224", **small)
for folder, net in nets.items():
    timm.models.load_checkpoint(net.eval(), f"{folder}/last.pth.tar", strict=False)  # the average, if there is one
    apply_recipe(net, folder)
    compare(net, torch.load(f"{folder}/saved.pt"))
