"""Insert global attention into a torchvision network, train only the new weights, and remove it again."""

from functools import partial

import torch
from torchvision.models import resnet18

from farfield import insert, remove
from farfield.insertion import resnet_places
from farfield.nn import attention_for

# Is the left half of an image brighter than its right half?
images, labels = torch.rand(8, 3, 64, 64), torch.tensor([1] * 4 + [0] * 4)
images[:4, ..., :32] += 0.5
network = resnet18(weights=None, num_classes=2).eval()
before = network(images)

make = partial(attention_for, operator="kronecker_qkv")
added = insert(network, resnet_places("res2", "res3.*"), make, example=images)
assert torch.equal(network(images), before)
for path, module in added.items():
    count = sum(weight.numel() for weight in module.parameters())
    print(f"{path}: {module.attention.channels} channels, {count:,} new weights")

# Only the additions are trained.
optimizer = torch.optim.AdamW([weight for module in added.values() for weight in module.parameters()], lr=1e-3)
for step in range(6):
    loss = torch.nn.functional.cross_entropy(network(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

remove(network)
assert torch.equal(network(images), before)
print("removed: the output is the same as before")
