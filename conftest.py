"""Settings that every test shares: one thread, fixed seeds, derandomised hypothesis, skips that say why."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

# Workers with as many threads as cores fight over the cores, and a result must not depend on how many there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The equations are tested; tests of kernels switch them on where they were built, `everywhere.py` for all.
os.environ["FARFIELD_KERNELS"] = os.environ.get("FARFIELD_TEST_KERNELS", "0")

import hypothesis
import numpy as np
import pytest
import torch

CHECKS_SHAPES = os.environ.get("FARFIELD_TEST_SHAPES") == "1"
if CHECKS_SHAPES:  # before anything imports the library
    from helpers import shapes

    shapes.install()

DATA = Path(__file__).parents[1] / "shared" / "data"

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def keep_scripted_operations() -> None:
    """Keep what TorchScript knows by its address, in a table that does not hold it.

    An operation that gets a further overload (`torch.ao` defines some when it is imported, which `torch.compile` does)
    is replaced, and whatever is made at the address of the old one is compiled as that operation: a padding was.
    """
    register, kept = torch.jit._builtins._register_builtin, []

    def register_and_keep(function: object, name: str) -> None:
        kept.append(function)
        register(function, name)

    torch.jit._builtins._register_builtin = register_and_keep


keep_scripted_operations()
# A first example may compile or warm a cache: no deadline. Derandomised, so that a failure is the same for everybody.
hypothesis.settings.register_profile(
    "house",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.differing_executors],
    database=None,
)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("house"), max_examples=500)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


@pytest.fixture(scope="session")
def built() -> None:
    """The library of kernels is loaded; without a compiler there is none."""
    from farfield.ops.fast import kernels

    if (reason := kernels.problem()) is not None:
        pytest.skip(reason)


@pytest.fixture
def on(built: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run, on memory that holds NaN before it is written."""
    monkeypatch.setenv("FARFIELD_KERNELS", "1")
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(deterministic)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda`: where tests make their tensors."""
    parser.addoption("--device", default="cpu", help="where tests make their tensors (default: %(default)s)")


def pytest_configure(config: pytest.Config) -> None:
    """Make the device the default one, if it is another than the CPU."""
    device = torch.device(config.getoption("device"))
    if device.type == "cpu":
        return
    if device.type == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(f"--device {device}: PyTorch sees no CUDA device.")
    torch.set_default_device(device)
    # The bounds of the tests are those of float32, and cuDNN rounds what it convolves to TF32 unless told not to.
    torch.backends.cudnn.allow_tf32 = False


def pytest_collection_finish() -> None:
    """Keep modules and tests out of garbage collections, which otherwise go through all of them each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `slow` tests out unless `-m` asks for something; skip tests where they cannot run, and say why."""
    without_data = pytest.mark.skip(reason=f"no data packs at {DATA.relative_to(DATA.parents[2])}")
    slow, kept = [], []
    for item in items:
        if item.get_closest_marker("data") and not DATA.is_dir():
            item.add_marker(without_data)
        on_cpu = item.get_closest_marker("cpu")
        if on_cpu and torch.get_default_device().type != "cpu":
            item.add_marker(pytest.mark.skip(reason=f"on the CPU alone: {on_cpu.args[0]}"))
        unchecked = item.get_closest_marker("unchecked")
        if unchecked and CHECKS_SHAPES:
            item.add_marker(pytest.mark.skip(reason=f"without checks of shapes alone: {unchecked.args[0]}"))
        # A test that is named on the command line is meant to run.
        named = any("::" in str(argument) for argument in config.args)
        leave_out = item.get_closest_marker("slow") is not None and not config.option.markexpr and not named
        (slow if leave_out else kept).append(item)
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = kept


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every test, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest) -> None:
    """A test that compiles starts without another test's compiled frames and their recompile counts."""
    if "compile" in request.node.name:
        torch._dynamo.reset()


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads of torch, whatever the machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def planned_once() -> Iterator[None]:
    """Equal calls of a file share a plan, which takes most of their time; not for tests of plans."""
    from farfield.testing.predictions import plans_made_once

    with plans_made_once():
        yield


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that leaves nothing in this checkout, the user's cache, or the environment of other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own in place of the user's; the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line in this process; what it prints."""
    from farfield.cli import main

    def run(*words: str) -> str:
        main(words)
        return capsys.readouterr().out

    return run


@pytest.fixture
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks import each other by name, as when they are run."""
    for folder in ("papers/benchmarks", "benchmarks"):
        monkeypatch.syspath_prepend(str(Path(__file__).parent / folder))


@pytest.fixture
def data() -> Path:
    """The folder of the data packs; tests that take it are marked `data`."""
    return DATA
