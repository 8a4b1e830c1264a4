"""The networks, tasks, data and recipes of the papers on Kronecker, Siamese and factorized attention, on `farfield`.

- ``models``: the networks, ``MODELS``, ``from_pretrained``
- ``nn``: the blocks of the compact networks
- ``tasks``, ``data``: what trains them, for Lightning
- ``theory``: ``MatrixNormal`` and Theorem 1 of the Kronecker paper
- ``cli``: the commands that ``farfield`` has where this package is installed
"""

__version__ = "0.4.0"
