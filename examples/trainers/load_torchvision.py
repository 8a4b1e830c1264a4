"""torchvision's references: load what train_torchvision.py saved in a new process, export it to ONNX, and compare."""

import torch
import torchvision
from common import compare

from farfield.insertion import apply_recipe

state = torch.load("checkpoint.pth")["model_ema"]
state = {name.removeprefix("module."): weight for name, weight in state.items()}
net = torchvision.models.resnet18(num_classes=10).eval()
net.load_state_dict(state, strict=False)
apply_recipe(net, ".")
compare(net, torch.load("saved.pt"))
