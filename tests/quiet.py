"""What tests of `farfield fit` share: a trainer that says little, and a folder of their own."""

from __future__ import annotations

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
