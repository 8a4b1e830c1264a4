"""A Kronecker response and its parts
=====================================

Kronecker operators attend to the means of rows and columns, `farfield.ops.axis_means`, and their response is an
outer sum, `farfield.ops.outer_sum`: one vector for the rows plus one for the columns. Both vectors contain the mean of
the grid. `kronecker_qkv_literal` counts it twice, as KAN prints it, and is too bright; `kronecker_qkv` counts it once
(Eq. 13, see :doc:`/equations`).
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image

from farfield import ops

image = torch.tensor(load_sample_image("flower.jpg")).float().permute(2, 0, 1)[None] / 255
height, width = image.shape[2:]
means = ops.axis_means(image)  # (1, 3, height + width)
rows, columns = means.split((height, width), -1)

# Queries and keys are standardized colours, values are the colours themselves.
deviation, mean = torch.std_mean(image, (2, 3), keepdim=True)
colours = 2 * (image - mean) / deviation
panels = {
    "photograph and its axis means": image,
    "outer sum of the axis means − mean": ops.outer_sum(means, (height, width)) - mean,
    "response of kronecker_qkv_literal": ops.kronecker_qkv_literal_attention(colours, colours, image),
    "response of kronecker_qkv": ops.kronecker_qkv_attention(colours, colours, image),
}

figure, axes = plt.subplots(2, 2, figsize=(8, 6.1), layout="constrained")
for axis, (title, panel) in zip(axes.flat, panels.items(), strict=True):
    axis.set_title(f"{title}\nmean {panel.mean():.2f}", fontsize=10)
    if panel is image:  # one colour for each row on the right, one for each column below
        panel = torch.nn.functional.pad(image, (0, 40, 0, 40), value=1.0)
        panel[..., :height, -30:], panel[..., -30:, :width] = rows[..., None], columns[:, :, None]
    axis.imshow(panel[0].permute(1, 2, 0).clamp(0, 1))
    axis.set_axis_off()
plt.show()
