"""Each file that refuses has a row in a table of followed fixes, or stands here with what it refuses."""

from __future__ import annotations

from pathlib import Path

import farfield
from helpers.followed import assert_each_file_has_a_row

LEFT_OUT = {
    "integrations/bioimageio/__init__.py": "needs bioimageio.core, whose environment tests/integrations make",
    "integrations/bioimageio/reading.py": "needs bioimageio.core",
    "integrations/bioimageio/writing.py": "needs bioimageio.core",
    "integrations/napari/widget.py": "needs napari, whose environment tests/integrations make",
    "integrations/nnunet/trainers/farfield_trainer.py": "needs nnunetv2, whose environment tests/integrations make",
    "ops/fast/kernels.py": "a fault of the library: a derivative was not left to equations",
    "streaming/checksums.py": "needs an environment without xxhash",
    "streaming/run.py": "a fault of the library: a box was read in another shape",
    "streaming/spans.py": "a fault of the library: a span was not read",
    "testing/faults.py": "the system refuses to watch a process",
    "testing/operators.py": "what a check of a user's operator finds",
    "testing/predictions.py": "the system refuses to watch a process",
    "testing/tiles.py": "what a check of a user's layer finds",
}


def test_each_file_that_refuses_has_a_row() -> None:
    assert_each_file_has_a_row(Path(farfield.__file__).parent, Path(__file__).parent, LEFT_OUT.keys())
