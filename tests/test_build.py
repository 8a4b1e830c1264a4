"""`hatch_build.py`: the library in the wheel, or the reason why there is none."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from farfield.ops.fast import kernels
from helpers.running import ROOT


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """The module; its packages are those of the build."""
    pytest.importorskip("hatchling", reason="the build's own package")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_names_are_those_that_the_package_looks_for(hook: ModuleType) -> None:
    assert (hook.SOURCES, hook.SWITCH) == (kernels.FOLDER, kernels.SWITCH)
    assert (kernels.LIBRARY.name, kernels.REASON.name) == (hook.LIBRARY, hook.REASON)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (
            "CXX",
            "no-such-compiler -O1",
            "no C++ compiler, 'no-such-compiler' was not found when farfield was installed",
        ),
        ("CXX", "", "no C++ compiler, '' was not found"),
        (kernels.SWITCH, "0", "FARFIELD_KERNELS was 0 when farfield was installed"),
    ],
)
def test_without_a_compiler_the_package_has_the_reason(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(kernels.SWITCH, "1")
    monkeypatch.setenv(name, value)
    (tmp_path / hook.LIBRARY).write_text("of an earlier build")
    made = hook.build_or_explain(tmp_path)
    assert made == tmp_path / hook.REASON
    assert made.read_text(encoding="utf-8").startswith(reason)
    assert [path.name for path in tmp_path.iterdir()] == [hook.REASON]
    assert hook.CustomBuildHook.dependencies(None) == []


def test_a_compiler_that_fails_is_quoted(hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("false") is None:
        pytest.skip("no command that fails")
    monkeypatch.setenv(kernels.SWITCH, "1")
    monkeypatch.setenv("CXX", "false")
    assert "false cannot compile them (pip install -v prints why); fix: another CXX=" in hook.build_or_explain(
        tmp_path
    ).read_text(encoding="utf-8")


def test_torchs_headers_are_those_of_this_environment(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert hook.torch_folder() == Path(torch.__file__).parent
    monkeypatch.setenv(kernels.SWITCH, "1")
    if shutil.which("c++") is not None:
        assert hook.CustomBuildHook.dependencies(None) == []
        monkeypatch.setattr(hook, "torch_folder", lambda: None)
        assert hook.CustomBuildHook.dependencies(None) == ["torch>=2.11"]


@pytest.mark.slow  # every installation builds it
def test_the_library_is_built(hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.SWITCH, "1")
    monkeypatch.delenv("CXX", raising=False)
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    (tmp_path / hook.REASON).write_text("of an earlier build")
    assert hook.build_or_explain(tmp_path) == tmp_path / hook.LIBRARY
    assert [path.name for path in tmp_path.iterdir()] == [hook.LIBRARY]
    assert (tmp_path / hook.LIBRARY).stat().st_size < 2**20
