"""Entry points for ``torch.hub``: every builder of ``farfield_papers.models.MODELS`` under its own name.

Example: ``torch.hub.load("path/to/farfield", "kanet_qkv", source="local", num_classes=10)``.
"""

from __future__ import annotations

import pathlib
import sys

dependencies = ["torch", "jaxtyping", "safetensors", "huggingface_hub"]

# torch.hub adds this folder to the path but not src/, and neither package may be installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "papers" / "src"))

from farfield_papers.models import MODELS  # noqa: E402

# torch.hub finds an entry point by its name in this module.
globals().update(MODELS)
