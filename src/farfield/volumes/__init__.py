"""Volumes in files and in memory: opened with their axes, voxel size and channels, read by regions, written by tiles.

TIFF and its relatives, zarr, OME-Zarr, NumPy, HDF5, NIfTI, MRC and folders of planes. Nothing is loaded before it is
sliced, and an output is at its path only when it is complete. Needs the extra `stream`, and some formats another.
"""

from farfield.volumes.image_metadata import ImageMetadata
from farfield.volumes.statistics import mean_and_std, percentiles
from farfield.volumes.volume import Volume, open_volume

__all__ = ["ImageMetadata", "Volume", "mean_and_std", "open_volume", "percentiles"]
