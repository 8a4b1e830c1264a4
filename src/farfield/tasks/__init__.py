"""One LightningModule a file: it takes a network as its argument, and knows neither models nor data.

Needs the extra `train`. Modules: `classify`, `segment` and `stereo` (the tasks), `checkpoints` (atomic writing, safe
reading, export), `predictions` and `disparities` (what `farfield predict` writes).
"""
