"""What averages keep
====================

KAN models a feature map as a matrix-variate normal whose covariance is a Kronecker sum, and Theorem 1 rebuilds it from
the averages of its rows and columns. The mean is kept; of the covariance little but the variance of each position is
(see :doc:`/api/theory` for the limits of the theorem). A Kronecker product would be smooth in both directions at once.
`farfield_papers.theory.MatrixNormal` draws all of them without the covariance matrix of all positions.
"""

import matplotlib.pyplot as plt
import torch

from farfield_papers.theory import MatrixNormal, averages, outer_sum, reconstruct

torch.manual_seed(1)
LENGTH, CENTRE = 64, 32
index = torch.arange(LENGTH, dtype=torch.float64)
smooth = torch.exp(-((index[:, None] - index) ** 2) / (2 * 6**2)) + 1e-4 * torch.eye(LENGTH)
mean = outer_sum((index / 10).sin(), (index / 7).cos())

product = MatrixNormal(mean, smooth, smooth, structure="product")
kronecker_sum = MatrixNormal(mean, smooth, smooth, structure="sum")
rebuilt = reconstruct(*averages(kronecker_sum), normalized=True)


def covariance_with_centre(distribution: MatrixNormal) -> torch.Tensor:
    """Return the covariance of each position with the position in the centre."""
    row, column = distribution.row_covariance[:, CENTRE], distribution.column_covariance[:, CENTRE]
    if distribution.structure == "product":
        return torch.outer(row, column)
    centre = (index == CENTRE).double()
    return torch.outer(row, centre) + torch.outer(centre, column)


figure, axes = plt.subplots(2, 3, figsize=(8, 5.7), layout="constrained")
panels = {"Kronecker product": product, "Kronecker sum": kronecker_sum, "the sum, rebuilt from averages": rebuilt}
for (top, bottom), (title, distribution) in zip(axes.T, panels.items(), strict=True):
    top.imshow(distribution.sample(), cmap="viridis", vmin=-3.5, vmax=3.5)
    top.set_title(f"{title}\na sample", fontsize=10)
    covariance = covariance_with_centre(distribution)
    bottom.imshow(covariance, cmap="magma", vmin=0)
    bottom.set_title(f"covariance with the centre\nat most {covariance.max():.2f}", fontsize=10)
for axis in axes.flat:
    axis.set_axis_off()
plt.show()
