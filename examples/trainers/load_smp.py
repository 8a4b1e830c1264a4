"""segmentation_models_pytorch: load what train_smp.py saved in a new process, export it to ONNX, and compare."""

import segmentation_models_pytorch as smp
import torch
from common import compare

from farfield.insertion import apply_recipe

net = smp.from_pretrained("out", strict=False).eval()
apply_recipe(net, "out")
compare(net, torch.load("saved.pt"))
