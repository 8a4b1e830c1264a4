"""Models and programs of others, with networks that run in exact tiles: nnU-Net, MONAI, bioimage.io and napari.

Each module needs the package that it is named after, and nothing else here imports it. What is theirs (preprocessing,
formats, widgets) their package does; `farfield.streaming.predict_whole` runs the network.
"""
