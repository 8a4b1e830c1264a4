"""Scans along an axis that is cut: the states at the ends of tiles, from one tile of a line to the next.

A tile takes the states that the tile before it has left. Where these are not known, as after a prediction that was
stopped, or where another process has run that tile, the tiles of the line before it run again for their states alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from farfield.streaming.plan import StreamingPlan


class Lines:
    """The states behind tiles of a plan, of each scan and line of tiles."""

    def __init__(self, plan: StreamingPlan) -> None:
        self.plan, self.lock = plan, threading.Lock()
        # (scan, the places of a line along other axes) -> place in the order of the line -> the states behind it.
        self.known: dict[tuple[int, tuple[int, ...]], dict[int, list[Tensor]]] = {}

    def clear(self) -> None:
        with self.lock:
            self.known.clear()

    def find(self, node: int, index: int, run: Callable[[int, list[Tensor]], None]) -> list[Tensor]:
        """Return the states before a tile, none before the first; `run(tile, states)` puts those behind a tile."""
        place, line = self._locate(node, index)
        with self.lock:
            known = {each: states for each, states in self.known.get(line, {}).items() if each < place}
        last = max(known, default=-1)
        states = list(known.get(last, ()))
        for each in range(last + 1, place):
            run(self._index_at(node, index, each), states)
            self._keep(node, line, each, states)
        return states

    def keep(self, node: int, index: int, states: list[Tensor]) -> None:
        """Keep the states behind a tile."""
        place, line = self._locate(node, index)
        self._keep(node, line, place, states)

    def _keep(self, node: int, line: tuple[int, tuple[int, ...]], place: int, states: list[Tensor]) -> None:
        with self.lock:
            own = self.known.setdefault(line, {})
            # Tiles run from the first: those that are scanned back need the states of all.
            for each in [] if self.plan.labelled.scans[node].back else [each for each in own if each < place]:
                del own[each]
            own[place] = list(states)

    def _locate(self, node: int, index: int) -> tuple[int, tuple[int, tuple[int, ...]]]:
        """Return the place of a tile in its line, and the line."""
        scan, places = self.plan.labelled.scans[node], self.plan.cores.places(index)
        place = places.pop(scan.axis)
        return (self.plan.cores.counts[scan.axis] - 1 - place if scan.back else place), (node, tuple(places))

    def _index_at(self, node: int, index: int, place: int) -> int:
        """Return the tile at a place in the line of another one."""
        scan, cores = self.plan.labelled.scans[node], self.plan.cores
        places = cores.places(index)
        places[scan.axis] = cores.counts[scan.axis] - 1 - place if scan.back else place
        return cores.index_of(places)
