"""How far the equation is from the call: which functions of the library a call goes through, in how many files.

    python benchmarks/walk.py
    python benchmarks/walk.py --tree "GridAttention.forward"     # every call of one walk, indented
    PYTHONPATH=../other/src python benchmarks/walk.py            # the same of another checkout

Counted are the functions of the library that run in the second call, when everything is imported and cached: different
functions (`functions`, in so many `files`), and all calls (`calls`). `depth` is the largest number of nested calls. A
walk is the sequence of files that calls enter; it `returns` where it enters a file that it has left, and `climbs` where
a function calls another one in the file of one of its callers, but not in its own. Checks of arguments, which compute
nothing, are counted in their own column only. `to the equation` are the functions entered, and their files, before the
first one of `summary.py`: the equation itself.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torchvision.models import resnet18

import farfield
from farfield import insert, ops
from farfield.nn import GridAttention
from farfield.streaming import Tiles, predict_whole

ROOT = Path(farfield.__file__).parent
# Files with checks of arguments.
CHECKS = ("_checks.py", "nn/checks.py")
DOORS = str(ROOT / "_refusals.py")
EQUATION = "ops/summary.py"


class Call(NamedTuple):
    """A call of a function of the library.

    Attributes:
        code: The function.
        file: Its file, relative to the package.
        callers: The files of the library's functions that call it, the innermost last.
    """

    code: CodeType
    file: str
    callers: tuple[str, ...]


def trace(action: Callable[[], Any]) -> list[Call]:
    """Return every call of the library's functions in an action, in order."""
    calls: list[Call] = []
    inside: list[tuple[FrameType, str]] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        # Comprehensions and lambdas belong to the function that contains them; so does what names its errors.
        if not code.co_filename.startswith(str(ROOT)) or code.co_name.startswith("<") or code.co_filename == DOORS:
            return
        if event == "call":
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            calls.append(Call(code, file, tuple(file for _, file in inside)))
            inside.append((frame, file))
        elif event == "return" and inside and inside[-1][0] is frame:
            inside.pop()

    sys.setprofile(look)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def summary(calls: list[Call]) -> dict[str, int]:
    """Count the numbers of a walk."""
    checks = [call for call in calls if call.file.endswith(CHECKS)]
    walk = [call for call in calls if call not in checks and not any(file.endswith(CHECKS) for file in call.callers)]
    stays = [file for file, _ in itertools.groupby(call.file for call in walk)]
    climbs = [call for call in walk if call.callers and call.file != call.callers[-1] and call.file in call.callers]
    way = list(itertools.takewhile(lambda call: call.file != EQUATION, walk))
    return {
        "functions to the equation": len({call.code for call in way}),
        "files to it": len({call.file for call in way}),
        "functions": len({call.code for call in walk}),
        "files": len(set(stays)),
        "calls": len(walk),
        "depth": max(len(call.callers) + 1 for call in walk),
        "returns": len(stays) - len(set(stays)),
        "climbs": len(climbs),
        "functions that check": len({call.code for call in checks}),
    }


def walks() -> dict[str, Callable[[], Any]]:
    """Return the actions that are traced."""
    image, photo = torch.randn(1, 8, 12, 12), torch.randn(1, 3, 64, 64)
    plain = {name: GridAttention(8, name).eval() for name in ("averaged", "softmax", "kronecker_qkv", "siamese")}
    learning = GridAttention(8, "siamese", project="qkvo", residual=True)
    volume = np.zeros((8, 24, 24), np.float32)
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), GridAttention(4, "averaged")).eval()

    def forward(attention: GridAttention) -> None:
        with torch.no_grad():
            attention(image)

    def train() -> None:
        learning(image).square().mean().backward()

    def put() -> None:
        insert(resnet18(), "layer3", lambda channels: GridAttention(channels, "averaged"), example=photo)

    return {
        **{f"GridAttention.forward, {name}": lambda each=each: forward(each) for name, each in plain.items()},
        "siamese_attention": lambda: ops.siamese_attention(image, image, image, weight=torch.randn(8)),
        "a training step, siamese": train,
        "insert": put,
        "predict_whole": lambda: predict_whole(net, volume, tile=Tiles((8, 16, 16), workers=1), quiet=True),
    }


def tree(calls: list[Call]) -> str:
    """Format every call, indented by its depth."""
    return "\n".join(f"{'  ' * len(call.callers)}{call.code.co_qualname}  {call.file}" for call in calls)


def main() -> None:
    """Print the table, or one walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", metavar="WALK", help="print every call of the walks whose names start with this")
    options = parser.parse_args()
    torch.manual_seed(0)
    for index, (name, action) in enumerate(walks().items()):
        action()
        calls = trace(action)
        if options.tree:
            print(f"{name}\n{tree(calls)}\n" if name.startswith(options.tree) else "", end="")
            continue
        numbers = summary(calls)
        if index == 0:
            print(f"| walk | {' | '.join(numbers)} |\n|---|{'---|' * len(numbers)}")
        print(f"| {name} | {' | '.join(map(str, numbers.values()))} |")


if __name__ == "__main__":
    main()
