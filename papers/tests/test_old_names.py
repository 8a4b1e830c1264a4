"""Names of 0.3 work with a warning; its runs and pickled modules load. `saved/0.3` was made by that version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import farfield
from farfield._old_names import current_name
from farfield.cli import main
from farfield_papers import models
from farfield_papers.tasks.runs import load_run

SAVED = Path(__file__).parent / "saved" / "0.3"
OLD = (
    "from farfield import models, theory, tasks, data",
    "import farfield.models.unet, farfield.tasks.restore_stack, farfield.data.classify",
    "from farfield.nn import AttentionBlock, BaseBlock, SqueezeExcite",
    "from farfield.nn.blocks import AttentionBlock",
    "import farfield; farfield.models.kanet_qkv, farfield.nn.AttentionBlock",
)


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.parametrize("statement", OLD)
def test_an_old_name_is_the_new_one_and_warns_where_it_stands(statement: str) -> None:
    check = "import sys; moved = [each for each in sys.modules if each.startswith('farfield.models')]; "
    check += "assert all(sys.modules[each].__name__.startswith('farfield_papers.models') for each in moved), moved"
    done = run(f"{statement}\n{check}")
    assert done.returncode == 0, done.stderr
    assert "<string>:1: DeprecationWarning: farfield." in done.stderr
    assert "is farfield_papers." in done.stderr
    lines = [line for line in done.stderr.splitlines() if "DeprecationWarning" in line]
    assert len(lines) == len(set(lines))


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "farfield_papers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.mark.long
@pytest.mark.parametrize("statement", OLD)
def test_without_the_papers_an_old_name_says_what_to_install(statement: str) -> None:
    done = run(f"{ABSENT}{statement}")
    assert done.returncode == 1
    assert "ImportError: farfield." in done.stderr
    assert "of farfield-papers; fix: pip install " in done.stderr


def test_names_that_have_not_moved() -> None:
    for name in ("farfield.nn", "farfield.nn.attention", "farfield.modelsx", "torch.models", "farfield", "models"):
        assert current_name(name) == name
    with pytest.raises(AttributeError, match="has no attribute 'GridAttn'"):
        farfield.nn.GridAttn  # noqa: B018


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_modules_that_were_pickled() -> None:
    block = torch.load(SAVED / "block.pt", weights_only=False)
    net = torch.load(SAVED / "unet.pt", weights_only=False)
    assert type(block).__module__ == "farfield_papers.nn.blocks"
    assert type(net) is models.UNet
    saved = torch.load(SAVED / "outputs.pt")
    torch.testing.assert_close(block(saved["block in"]), saved["block"])
    torch.testing.assert_close(net(saved["unet in"]), saved["unet"])


def test_a_run() -> None:
    net, task, data = load_run(str(SAVED / "run"))
    assert (task, data.name) == ("classify", "farfield.data.classify.Digits")
    saved = torch.load(SAVED / "outputs.pt")
    torch.testing.assert_close(net(saved["run in"]), saved["run"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_commands_with_the_configuration_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(SAVED / "run" / "config.yaml"), "--trainer.accelerator", "cpu"]
    main(["test", *words, "--ckpt_path", str(SAVED / "run" / "checkpoints" / "best.ckpt")])
    assert "test/accuracy 0." in capsys.readouterr().out
    main(["fit", *words, "--trainer.fast_dev_run", "true", "--trainer.max_epochs", "1"])
