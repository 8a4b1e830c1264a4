"""One LightningModule a file: it takes a network as its argument, and knows neither models nor data.

Needs the extra `train`. Modules: `classify` and `segment` (the tasks), `checkpoints` (atomic writing, safe reading,
export), `predictions` (what `farfield predict` writes), `detect` and `detections` (the same for objects in images).
"""
