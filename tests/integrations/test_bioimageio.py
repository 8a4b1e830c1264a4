"""Packages of bioimage.io: tests in an environment that has bioimageio.core, and what is said without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from farfield.cli import main
from helpers.environments import make_environment, run_in
from helpers.followed import write_files


@pytest.mark.slow
def test_packages(tmp_path: Path) -> None:
    python = make_environment("bioimageio")
    if python is None:
        pytest.skip("pip cannot install bioimageio.core")
    tests = Path(__file__).with_name("test_bioimageio_packages.py")
    words = ["-m", "pytest", "-q", "-m", "slow", "-p", "no:cacheprovider", str(tests)]
    done = run_in(python, words, tmp_path, OMP_NUM_THREADS="1", BIOIMAGEIO_CACHE_PATH=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.skipif(importlib.util.find_spec("bioimageio") is not None, reason="bioimageio.core is installed")
def test_the_missing_extra_is_named(apart: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"bioimageio is not installed; fix: pip install .*\[bioimageio\]"):
        importlib.import_module("farfield.integrations.bioimageio")
    write_files()
    Path("unet.zip").touch()
    with pytest.raises(SystemExit):
        main(["predict", "--bioimageio", "unet.zip", "--input", "volume.npy", "--output", "b.tif"])
    assert "[bioimageio]" in capsys.readouterr().err


def test_the_options_are_those_of_the_function(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["predict", "--bioimageio", "unet.zip", "--input", "a.tif"])
    assert "OUTPUT" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["predict", "--bioimageio", "unet.zip", "--tiel.size", "8"])
    assert "--tile" in capsys.readouterr().err
