"""MONAI: train with attention, save, and write a recipe beside; load_monai.py loads it."""

import torch
from common import digits, make
from monai.data import DataLoader, Dataset
from monai.losses import DiceCELoss
from monai.networks.nets import BasicUNet
from monai.transforms import Compose, RandGaussianNoised, RandRotate90d

from farfield import insert
from farfield.insertion import save_recipe

images, _ = digits(32, channels=1)
files = [{"image": image, "label": (image > 0).float()} for image in images]
change = Compose([RandRotate90d(["image", "label"]), RandGaussianNoised("image", prob=1.0, std=0.3)])
net = BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, features=(8, 8, 16, 16, 32, 8))
insert(net, ["down_3", "down_4"], make, example=images[:1])
loss, optimizer = DiceCELoss(to_onehot_y=True, softmax=True), torch.optim.AdamW(net.parameters(), 1e-3)
for _ in range(2):
    for batch in DataLoader(Dataset(files, change), batch_size=32, shuffle=True):
        optimizer.zero_grad()
        loss(net(batch["image"].as_tensor()), batch["label"].as_tensor()).backward()
        optimizer.step()
torch.save(net.state_dict(), "best_metric_model.pth")
save_recipe(net, ".")
with torch.no_grad():
    torch.save({"images": images[:4], "output": net.eval()(images[:4])}, "saved.pt")
