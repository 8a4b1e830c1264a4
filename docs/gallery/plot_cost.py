"""Cost against the grid
========================

MACs and memory of one attention layer of 64 channels on square grids. Those of softmax grow with the square of the
number of positions; those of operators with a fixed number of slots grow with the number of positions.
`farfield.cost.predict` counts by formula what executes; its memory here is that of the papers, which store every
coefficient. :doc:`/performance` has measured times.
"""

import matplotlib.pyplot as plt

from farfield import cost

OPERATORS = ("softmax", "softmax_pooled", "kronecker_kv", "factorized_gaussian", "kronecker_qkv", "siamese")
lengths = [2**power for power in range(3, 11)]

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 4.8), layout="constrained")
for name in OPERATORS:
    macs = [cost.predict(name, channels=64, size=(length, length)).macs for length in lengths]
    memory = [
        cost.predict(name, channels=64, size=(length, length), convention="paper").activation_bytes / 2**20
        for length in lengths
    ]
    left.loglog(lengths, macs, "o-", markersize=4, label=name)
    right.loglog(lengths, memory, "o-", markersize=4)

left.set_title("MACs", fontsize=11)
right.set_title("memory in MiB, coefficients stored", fontsize=11)
for axis in (left, right):
    axis.set_xlabel("height = width")
    axis.set_xticks(lengths, lengths)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
figure.legend(loc="outside lower center", ncols=3, frameon=False)
plt.show()
