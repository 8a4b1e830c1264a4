"""The command itself: what it prints before a command runs."""

from __future__ import annotations

import contextlib
import sys
import warnings

import pytest

from farfield import cli
from farfield._checks import install_command


@pytest.mark.parametrize(
    ("words", "terminal", "said"),
    [
        (["linearize", "--help"], True, False),
        (["linearize", "--ouut", "x"], True, False),
        (["linearize", "--out", "nowhere"], True, True),
        (["linearize", "--out", "nowhere"], False, False),
        (["operators"], True, False),
    ],
)
def test_a_command_whose_imports_take_seconds_says_that_it_started(
    words: list[str], terminal: bool, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with contextlib.suppress(SystemExit):
        cli.main(words)
    assert (f"farfield {words[0]}: loading\n" in capsys.readouterr().err) is said


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [("PIL", "Pillow", "plots"), ("matplotlib", "matplotlib", "plots"), ("nibabel", "nibabel", "nifti")],
)
def test_a_missing_package_is_named_as_pip_names_it(
    module: str, name: str, extra: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=f"{module}.part")

    monkeypatch.setattr(cli.importlib, "import_module", lacking)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["linearize", "--out", "x"])
    # torch may warn on stderr while it loads.
    text = capsys.readouterr().err.splitlines()[-1]
    assert text == f"farfield linearize: {name} is not installed; fix: {install_command(extra)}"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("remove that folder, or overwrite=True.", "remove that folder, or --overwrite."),
        ("tile=Tiles(…, disk=100000), or attention", "--disk 100000, or attention"),
        ('a size that 4 × 4 divides, or pad="reflect".', "a size that 4 × 4 divides, or --pad reflect."),
        ('fix: out="a.b.zarr" takes it', "fix: --output a.b.zarr takes it"),
        ("fix: series=0", "fix: --series 0"),
        ("fix: trust=True, if", "fix: --trust, if"),
    ],
)
def test_a_message_of_predict_names_options(
    text: str, want: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError(text)

    monkeypatch.setattr(cli, "dispatch", refuse)
    with pytest.raises(SystemExit):
        cli.main(["predict", "a", "b", "c"])
    assert capsys.readouterr().err == f"farfield predict: {want}\n"


@pytest.mark.parametrize("debug", [False, True])
def test_a_warning_is_its_text(
    debug: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*_: object) -> None:
        # As Python shows it: pytest's own filters record warnings instead.
        sys.stderr.write(warnings.formatwarning("the network has its initial weights", UserWarning, "train.py", 7))

    monkeypatch.setattr(cli, "dispatch", warn)
    cli.main(["test", *["--debug"] * debug])
    text = capsys.readouterr().err
    assert (text == "the network has its initial weights\n") is not debug
    assert ("train.py:7" in text) is debug
    assert "train.py:7" in warnings.formatwarning("after it", UserWarning, "train.py", 7)
