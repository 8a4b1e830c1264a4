"""One LightningDataModule a file: it reads the field's real format from a folder.

Needs the extra `train`. Modules: `classify` (the data modules), `augment` (transforms by name), `folders` (finding and
checking image files), `samples` (splits, and reading one image), `epochs` (order and augmentations that depend on the
seed and the epoch alone).
"""
