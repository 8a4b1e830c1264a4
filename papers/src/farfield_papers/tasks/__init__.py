"""Training tasks, one LightningModule per file; each takes a network as an argument and imports no models and no data.

Modules: `classify`, `segment`, `restore`, `detect`, `stereo`, `masked_lm` and `generate` (the
tasks), `training_task` (their base class), `restore_stack` (restores one whole stack), `metrics` (of restored stacks),
`checkpoints` (atomic writing, safe reading, export), `logs` (a run's folder), `runs` and `configuration` (the network
of a run, loaded again), and the package `writers` (the files of `farfield predict`).
"""
