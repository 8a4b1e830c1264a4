"""One LightningDataModule per file; each reads the usual file format of its task from a folder.

Needs the extra `train`. Modules: `classify`, `segment`, `restore`, `detect`, `stereo`, `masked_lm` and `generate` (the
data modules), `loading` (their base class), `augment` (transforms by name), `folders` (finding and checking image
files), `pairs` (the same for images and masks), `stacks` and `patches` (for microscopy), `coco` and `objects` (for
objects in images), `frames` (for stereo pairs), `texts` and `tokens` (for text), `samples` (splits and datasets of
images), `epochs` (order and augmentations that depend only on the seed and the epoch).
"""
