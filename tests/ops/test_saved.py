"""A summary that an earlier version saved is read, merged and responded to by this one."""

from __future__ import annotations

from pathlib import Path

import torch

from farfield.ops import OPERATORS, Summary, respond

SAVED = Path(__file__).parent / "saved" / "summary.pt"


def test_a_saved_summary_is_read_by_this_version():
    saved = torch.load(SAVED, weights_only=True)
    summary = Summary(**saved["summary"])
    row = OPERATORS["factorized_gaussian"]
    torch.testing.assert_close(respond(row, saved["query"], summary), saved["response"])
    twice = summary.merge(summary)
    torch.testing.assert_close(respond(row, saved["query"], twice), saved["response"])
