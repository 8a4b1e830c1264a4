"""The table of rules: operation -> how it runs on a part of the volume."""

from __future__ import annotations

import torch

from farfield.streaming.graph import find_operation
from farfield.streaming.rules.aligned import ALIGNED_RULES, POINTWISE
from farfield.streaming.rules.norms import NORM_RULES
from farfield.streaming.rules.pooling import POOLING_RULES
from farfield.streaming.rules.reading import READING_RULES
from farfield.streaming.rules.recurrent import RECURRENT_RULES
from farfield.streaming.rules.rule import Rule
from farfield.streaming.rules.scans import SCAN_RULES
from farfield.streaming.rules.spectra import SPECTRUM_RULES
from farfield.streaming.rules.sums import SUM_RULES
from farfield.streaming.rules.windows import WINDOW_RULES

RULES: dict[str, Rule] = {
    **ALIGNED_RULES,
    **READING_RULES,
    **WINDOW_RULES,
    **POOLING_RULES,
    **SUM_RULES,
    **NORM_RULES,
    **SPECTRUM_RULES,
    **RECURRENT_RULES,
    **SCAN_RULES,
}


def find_rule(op: str) -> Rule | None:
    """Return the rule of an operation; None if there is none."""
    rule = RULES.get(op)
    if rule is not None or not op.startswith(("aten.", "prims.")):
        return rule
    return POINTWISE if torch.Tag.pointwise in find_operation(op).tags else None
