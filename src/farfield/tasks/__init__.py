"""Training tasks, one LightningModule per file; each takes a network as an argument and imports no models and no data.

Needs the extra `train`. Modules: `classify`, `segment`, `restore`, `detect`, `stereo`, `masked_lm` and `generate` (the
tasks), `checkpoints` (atomic writing, safe reading, export), `logs` (a run's folder), and the writers of
`farfield predict`: `predictions`, `restoring`, `detections`, `disparities`, `filled` and `samples`.
"""
