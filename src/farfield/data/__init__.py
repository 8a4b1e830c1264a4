"""One LightningDataModule a file: it reads the field's real format from a folder.

Needs the extra `train`. Modules: `classify`, `segment`, `restore`, `detect`, `stereo`, `masked_lm` and `generate` (the
data modules), `loading` (what they share), `augment` (transforms by name), `folders` (finding and checking image
files), `pairs` (the same for images and masks), `stacks` and `patches` (for microscopy), `coco` and `objects` (for
objects in images), `frames` (for stereo pairs), `texts` and `tokens` (for text), `samples` (splits, and reading one
image), `epochs` (order and augmentations that depend on the seed and the epoch alone).
"""
