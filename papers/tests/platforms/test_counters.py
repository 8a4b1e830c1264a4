"""The papers' language model with weights of 8 bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farfield_papers import models


@pytest.mark.cpu("torch quantizes dynamically on CPUs")
@pytest.mark.filterwarnings("ignore")
def test_a_bert_of_8_bits() -> None:
    model, words = models.bert_small(vocabulary=60).eval(), torch.randint(0, 60, (2, 9))
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with torch.no_grad():
        found, expected = quantized(words), model(words)
    assert not torch.equal(found, expected)
    assert float((found - expected).norm() / expected.norm()) <= 0.05
