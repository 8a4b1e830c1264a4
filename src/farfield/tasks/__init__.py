"""One LightningModule a file: it takes a network as its argument, and knows neither models nor data.

Needs the extra `train`. Modules: `classify`, `segment`, `restore`, `detect`, `stereo`, `masked_lm` and `generate` (the
tasks), `checkpoints` (atomic writing, safe reading, export), `logs` (a run's folder), and what `farfield predict`
writes: `predictions`, `restoring`, `detections`, `disparities`, `filled` and `samples`.
"""
