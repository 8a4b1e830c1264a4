"""From a patch to the whole image
==================================

The gradient of one position of a ResNet's features with respect to the photograph: the part that the position depends
on. :func:`farfield.insert <farfield.insertion.insert>` puts attention behind a stage and leaves the output as it was,
because the output projection is zero at first. As soon as it is not, the position depends on the whole photograph.
:doc:`/guide/insert` has the places of the papers and how to train.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from skimage import data, transform
from torchvision.models import resnet18

from farfield import insert
from farfield.nn import attention_for

torch.manual_seed(0)
POSITION, STRIDE = (14, 21), 8
photograph = transform.resize(data.rocket(), (224, 336), anti_aliasing=True)
image = torch.tensor(photograph).float().permute(2, 0, 1)[None]
network = resnet18(weights=None).eval()
stages = torch.nn.Sequential(*list(network.children())[:6])  # up to layer2


def sensitivity() -> torch.Tensor:
    """Return the size of the gradient of one position of the features at each pixel."""
    pixels = image.clone().requires_grad_()
    stages(pixels)[0, :, *POSITION].sum().backward()
    return pixels.grad[0].norm(dim=0)


panels = {"before": sensitivity()}
addition = insert(network, "layer2", attention_for, example=image)["layer2"]
panels["after insertion, the same"] = sensitivity()
addition.attention.output.reset_parameters()
panels["output projection not zero"] = sensitivity()

figure, axes = plt.subplots(2, 2, figsize=(8, 6.2), layout="constrained")
axes[0, 0].imshow(photograph)
y, x = ((index + 0.5) * STRIDE for index in POSITION)
axes[0, 0].plot(x, y, "o", markersize=8, markerfacecolor="none", markeredgecolor="white", markeredgewidth=1.5)
axes[0, 0].set_title("photograph and the position", fontsize=10)
for axis, (title, panel) in zip(axes.flat[1:], panels.items(), strict=True):
    picture = axis.imshow(panel / panels["before"].max(), cmap="magma", norm=LogNorm(1e-5, 1, clip=True))
    axis.set_title(title, fontsize=10)
figure.colorbar(picture, ax=axes, location="bottom", shrink=0.5, aspect=40, label="|gradient|, largest before = 1")
for axis in axes.flat:
    axis.set_axis_off()
plt.show()
