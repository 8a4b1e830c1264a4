"""A widget for napari, "Predict a whole volume": its manifest is `napari.yaml`, which napari finds by itself.

`widget` needs napari and Qt, from the extra `napari`; `layers` needs neither, and `farfield.integrations.jobs` is what
the widget runs.
"""
