"""One LightningDataModule per file; each reads the usual file format of its task from a folder.

Modules: `classify`, `segment`, `restore`, `detect`, `stereo`, `masked_lm` and `generate` (the
data modules), `base` (their base class), `sampler` (order and augmentations that depend only on the seed and the
epoch), `augment` (transforms by name), `patches` (of microscopy stacks), `tokenizer` (tokenizers and samples of
tokens), and the package `readers` (reading and checking of files).
"""
