"""Environments with packages that conflict with those of the tests or are large: made on first use, kept in build/.

    python tests/helpers/environments.py nnunet

makes the one of an extra. An environment sees all packages of the one that makes it; its own stand before them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "environments"


# What the guide of an extra installs beside it.
BESIDE = {"napari": ["pyqt6"]}


def make_environment(extra: str) -> Path | None:
    """Return the Python of the environment of an extra, made if there is none; None if pip cannot install it."""
    folder = FOLDER / extra
    python, done = folder / "bin" / "python", folder / "installed"
    wanted = [*_requirements(extra), *BESIDE.get(extra, [])]
    if done.is_file() and done.read_text(encoding="utf-8") == repr(wanted):
        return python
    venv.create(folder, clear=True, with_pip=False)
    packages = next((folder / "lib").glob("python*/site-packages"))
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise RuntimeError("make_environment: torch is not installed here; fix: make install")
    (packages / "tests.pth").write_text(str(Path(torch.origin).parents[1]), encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-q", *wanted]
    if subprocess.run(pip, check=False).returncode:
        return None
    done.write_text(repr(wanted), encoding="utf-8")
    return python


def _requirements(extra: str) -> list[str]:
    """Return the packages of an extra that are not farfield's own extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [each for each in project["optional-dependencies"][extra] if not each.startswith("farfield")]


def run_in(python: Path, words: Sequence[str], folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment, from a folder, with this checkout's farfield; return what it printed."""
    # An environment sees the entry points of farfield-papers where that is installed.
    paths = os.pathsep.join(str(ROOT / each) for each in ("src", "papers/src", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "QT_QPA_PLATFORM": "offscreen", **settings}
    command = [str(python), *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(0 if all(map(make_environment, sys.argv[1:])) else 1)
