"""Hugging Face Trainer: load what train_huggingface.py saved in a new process, export it to ONNX, and compare."""

import torch
from common import compare
from transformers import ViTForImageClassification

from farfield.insertion import apply_recipe

model = ViTForImageClassification.from_pretrained("out", attn_implementation="eager").eval()
apply_recipe(model, "out")
compare(model, torch.load("saved.pt"))
