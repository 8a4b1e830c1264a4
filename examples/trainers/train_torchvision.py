"""torchvision's references: train with attention, save, and write a recipe beside; load_torchvision.py loads it."""

import torch
import torch.nn.functional as F
import torchvision
from common import digits, make
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models._api import register_model  # torchvision has no public name for it

from farfield import insert
from farfield.insertion import save_recipe


@register_model()
def resnet18_attention(**options):
    net = torchvision.models.resnet18(**options)
    insert(net, ["layer2", "layer3.0"], make, example=torch.zeros(1, 3, 64, 64))
    return net


images, labels = digits(32)
net = torchvision.models.get_model("resnet18_attention", weights=None, num_classes=10)
net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
optimizer = torch.optim.SGD(net.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
for _ in range(2):
    for image, label in zip(images.split(32), labels.split(32), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(net(image), label, label_smoothing=0.1).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(net)
torch.save({"model": net.state_dict(), "model_ema": average.state_dict()}, "checkpoint.pth")
save_recipe(average.module, ".")
with torch.no_grad():
    torch.save({"images": images[:4], "output": average.module.eval()(images[:4])}, "saved.pt")
