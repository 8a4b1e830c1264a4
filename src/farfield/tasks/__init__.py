"""One LightningModule a file: it takes a network as its argument, and knows neither models nor data.

Needs the extra `train`. Modules: `classify` (the task), `checkpoints` (atomic writing, safe reading, export),
`predictions` (the CSV file of `farfield predict`).
"""
