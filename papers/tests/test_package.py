"""The package of the papers as it is installed: light, in torch.hub, on the equation map, and by its old names."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from farfield_papers import models

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("names", ["models, nn, theory", "networks"])
def test_import_is_light(names: str) -> None:
    heavy = {"lightning", "torchvision", "transformers", "timm", "matplotlib", "sklearn", "skimage", "rich"}
    script = f"import sys\nfrom farfield_papers import {names}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert heavy & set(result.stdout.split()) == set()


def test_torch_hub_finds_every_model() -> None:
    specification = importlib.util.spec_from_file_location("hubconf", ROOT / "hubconf.py")
    assert specification is not None
    assert specification.loader is not None
    hubconf = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hubconf)
    entries = [name for name, value in vars(hubconf).items() if callable(value) and not name.startswith("_")]
    assert sorted(entries) == sorted(models.MODELS)
    net = torch.hub.load(str(ROOT), "kanet_qkv", source="local", num_classes=3, width=0.25).eval()
    assert net(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


def test_every_name_of_the_equation_map_exists() -> None:
    page = (ROOT / "papers" / "docs" / "equations.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`(farfield_papers\.[\w.]+)`", page))
    assert len(names) > 5
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), f"papers/docs/equations.md: no {name}"
