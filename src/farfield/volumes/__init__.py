"""Volumes in files and in memory: opened with their axes, voxel size and channels, read by regions, written by tiles.

TIFF, OME-TIFF, zarr, OME-Zarr and NumPy. Nothing is loaded before it is sliced, and an output is at its path only when
it is complete. Needs the extra `stream`: `pip install "farfield[stream]"`.
"""

from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.volume import Volume, open_volume

__all__ = ["ImageMetadata", "Volume", "open_volume"]
