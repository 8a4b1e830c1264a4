"""Each file that refuses has a row in a table of followed fixes, or stands here with what it refuses."""

from __future__ import annotations

from pathlib import Path

import farfield_papers
from helpers.followed import assert_each_file_has_a_row

LEFT_OUT = {
    "cli/signals.py": "it ends the process with the number of a signal",
    "cli/train.py": "it ends the process after a help",
    "data/readers/coco_entries.py": "readers/coco.py puts its texts into that of a file",
}


def test_each_file_that_refuses_has_a_row() -> None:
    assert_each_file_has_a_row(Path(farfield_papers.__file__).parent, Path(__file__).parent, LEFT_OUT.keys())
