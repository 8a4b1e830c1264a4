"""Checks for what users add: an operator, a layer that runs in tiles, a file format.

`reference` has every operator as float64 loops in NumPy, written from the papers: it imports nothing that is tested.
`check_operator` holds an operator of one's own against such loops, and `check_tiles` a network in tiles against the
network on the whole. `farfield.testing.predictions` draws programs of predictions, kills, full disks and damaged files;
it needs the extra `testing`. Nothing here needs pytest.
"""

from farfield.testing import reference
from farfield.testing.operators import check_operator
from farfield.testing.tiles import check_tiles

__all__ = ["check_operator", "check_tiles", "reference"]
