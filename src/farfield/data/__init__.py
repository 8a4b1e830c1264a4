"""One LightningDataModule a file: it reads the field's real format from a folder.

Needs the extra `train`. Modules: `classify` and `segment` (the data modules), `loading` (what they share), `augment`
(transforms by name), `folders` (finding and checking image files), `pairs` (the same for images and masks), `samples`
(splits, and reading one image), `detect`, `objects` and `coco` (the objects in images), `epochs` (order and
augmentations that depend on the seed and the epoch alone).
"""
