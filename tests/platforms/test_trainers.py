"""Each trainer of examples/trainers: train and save, then load in a new process, export and compare."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "trainers"
TRAINERS = sorted(path.stem.removeprefix("train_") for path in FOLDER.glob("train_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trained_model_is_loaded_and_exported_in_a_new_process(trainer: str, tmp_path: Path) -> None:
    names = ("common.py", f"train_{trainer}.py", f"load_{trainer}.py")
    for package in re.findall(r"^from (ultralytics)", (FOLDER / names[1]).read_text(encoding="utf-8"), re.MULTILINE):
        pytest.importorskip(package)
    for name in names:
        shutil.copy(FOLDER / name, tmp_path)
    for name in names[1:]:
        subprocess.run([sys.executable, "-W", "ignore", name], check=True, cwd=tmp_path, timeout=1200)


def test_every_trainer_has_two_programs_and_stands_on_the_page() -> None:
    assert len(TRAINERS) == 7
    assert sorted(path.stem.removeprefix("load_") for path in FOLDER.glob("load_*.py")) == TRAINERS
    page = (ROOT / "docs" / "guide" / "trainers.md").read_text(encoding="utf-8")
    assert all(f"examples/trainers/{part}_{trainer}.py" in page for trainer in TRAINERS for part in ("train", "load"))
