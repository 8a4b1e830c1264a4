"""segmentation_models_pytorch: train with attention, save, and write a recipe beside; load_smp.py loads it."""

import segmentation_models_pytorch as smp
import torch
from common import digits, make

from farfield import insert
from farfield.insertion import save_recipe

images, _ = digits(32)
masks = (images[:, :1] > 0).float()
net = smp.Unet("resnet18", encoder_weights=None, in_channels=3, classes=1)
insert(net, ["encoder.layer3", "encoder.layer4"], make, example=images[:1])
loss, optimizer = smp.losses.DiceLoss("binary"), torch.optim.AdamW(net.parameters(), 1e-3)
for _ in range(2):
    for image, mask in zip(images.split(32), masks.split(32), strict=True):
        optimizer.zero_grad()
        loss(net(image), mask).backward()
        optimizer.step()
net.eval().save_pretrained("out")
save_recipe(net, "out")
with torch.no_grad():
    torch.save({"images": images[:4], "output": net(images[:4])}, "saved.pt")
