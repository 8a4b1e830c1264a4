"""What tests of training share: a trainer that says little, and a folder of their own."""

from __future__ import annotations

from typing import Any

import pytest

TRAINER = {
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
}
# Lightning warns of small data, few workers and of its own use of torch.
MARKS = [
    pytest.mark.usefixtures("apart"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

# The same of a trainer that is made in Python.
QUIET: dict[str, Any] = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
    "accelerator": "cpu",
}
TASK_MARKS = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:The `srun` command"),
]
