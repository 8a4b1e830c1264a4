"""What `torch.jit.script` says of modules that it cannot compile."""

from __future__ import annotations

from typing import NoReturn


def refuse_to_script() -> NoReturn:
    """Raise TypeError; `torch.jit.script` calls it, as `__prepare_scriptable__` of a module, before anything else."""
    problem = "TorchScript has no rule for farfield's attention, nor for a layer that calls what was inserted behind it"
    fix = "torch.jit.trace(model, example) or torch.export.export(model, (example,))."
    raise TypeError(f"torch.jit.script: {problem}; fix: {fix}")
