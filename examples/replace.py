"""Replace the softmax attention of a small ViT that reads digits, and fine-tune it: accuracy before and after."""

import copy

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from farfield import replace_attention


def train(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int, rate: float) -> None:
    """Train by AdamW; the learning rate follows one cosine cycle."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    steps = epochs * -(-len(images) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that are classified correctly."""
    return (model.eval()(images).argmax(1) == labels).double().mean().item()


torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1  # (1797, 1, 8, 8)
labels = torch.tensor(digits.target)
kept = torch.randperm(len(images))
train_set, test_set = ((images[part], labels[part]) for part in (kept[:1200], kept[1200:]))

# 16 patches of 2x2 pixels.
sizes = {"embed_dim": 48, "depth": 2, "num_heads": 4, "mlp_ratio": 2, "class_token": False, "global_pool": "avg"}
vit = timm.models.VisionTransformer(img_size=8, patch_size=2, in_chans=1, num_classes=10, **sizes)
train(vit, *train_set, epochs=20, rate=3e-3)
print(f"softmax, trained:                       {accuracy(vit, *test_set):.1%} of {len(test_set[0])} digits right")
control = copy.deepcopy(vit)
train(control, *train_set, epochs=8, rate=1.5e-3)
print(f"softmax, trained as much longer:        {accuracy(control, *test_set):.1%}")

replace_attention(vit, "factorized_gaussian")
print(f"factorized_gaussian, right after:       {accuracy(vit, *test_set):.1%}")
train(vit, *train_set, epochs=8, rate=1.5e-3)
print(f"factorized_gaussian, after fine-tuning: {accuracy(vit, *test_set):.1%}")
