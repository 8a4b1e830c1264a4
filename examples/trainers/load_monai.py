"""MONAI: load what train_monai.py saved in a new process, export it to ONNX, and compare."""

import torch
from common import compare
from monai.networks.nets import BasicUNet

from farfield.insertion import apply_recipe

net = BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=(8, 8, 16, 16, 32, 8)).eval()
net.load_state_dict(torch.load("best_metric_model.pth"), strict=False)
apply_recipe(net, ".")
compare(net, torch.load("saved.pt"))
