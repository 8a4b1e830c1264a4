"""Hugging Face Trainer: train with attention, save, and write a recipe beside; load_huggingface.py loads it."""

import torch
from common import digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from farfield.insertion import linearize, save_recipe

images, labels = digits(16)
rows = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
config = ViTConfig(
    image_size=16,
    patch_size=2,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    num_labels=10,
)
model = ViTForImageClassification(config)
options = {"num_train_epochs": 2, "per_device_train_batch_size": 32, "learning_rate": 2e-3, "use_cpu": True}
options |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
Trainer(model, TrainingArguments("first", **options), train_dataset=rows).train()

inputs = [{"pixel_values": part} for part in images.split(32)]
print(linearize(model.vit, "linear_elu", inputs, steps=30, quiet=True))
trainer = Trainer(model, TrainingArguments("second", **options), train_dataset=rows)
trainer.train()
trainer.save_model("out")
save_recipe(model, "out")
with torch.no_grad():
    torch.save({"images": images[:4], "output": model.eval()(images[:4]).logits}, "saved.pt")
