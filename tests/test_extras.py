"""The command that an error names for a missing extra, by where farfield was installed from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from farfield import _checks
from farfield._checks import install_command, install_papers


def recorded(monkeypatch: pytest.MonkeyPatch, source: dict[str, Any] | None) -> None:
    """Make pip have recorded this source, None for an index."""

    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if source is None else json.dumps(source)

    monkeypatch.setattr(_checks, "distribution", lambda name: Distribution())


def test_from_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, None)
    assert install_command("nifti") == 'pip install "farfield[nifti]"'
    assert install_papers() == 'pip install "farfield-papers"'


@pytest.mark.parametrize("name", ["farfield-0.3.0-py3-none-any.whl", "a folder"])
def test_from_a_file_or_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    recorded(monkeypatch, {"url": path.as_uri()})
    assert install_command("nifti") == 'pip install "farfield[nifti]"'  # it is gone
    path.touch()
    assert install_command("nifti") == f'pip install "{path}[nifti]"'


def test_from_a_checkout_that_is_edited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded(monkeypatch, {"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert install_command("plots") == f'pip install -e "{tmp_path}[plots]"'
    assert install_papers() == 'pip install "farfield-papers"'  # it is no folder of this one
    (tmp_path / "papers").mkdir()
    assert install_papers() == f'pip install -e "{tmp_path / "papers"}"'


def test_from_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(monkeypatch, {"url": "ssh://example.org/farfield.git", "vcs_info": {"vcs": "git", "commit_id": "0"}})
    assert install_command("text") == 'pip install "farfield[text] @ git+ssh://example.org/farfield.git"'
    papers = "farfield-papers @ git+ssh://example.org/farfield.git#subdirectory=papers"
    assert install_papers() == f'pip install "{papers}"'


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(_checks, "distribution", missing)
    assert install_command("nifti") == 'pip install "farfield[nifti]"'


@pytest.mark.long
def test_streaming_without_its_extra_names_it() -> None:
    program = "import sys; sys.modules['xxhash'] = None; import farfield; farfield.streaming"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert re.search(r"ModuleNotFoundError: farfield\.streaming: .*xxhash.*fix: pip install .*\[stream\]", done.stderr)
