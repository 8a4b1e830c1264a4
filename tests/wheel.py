"""Check the built wheels: every file of a package is in its, and it runs from where pip puts it. `make dist` runs this.

python tests/wheel.py dist
python tests/wheel.py dist python3.11 python3.12 python3.13    # and in an empty environment of each of these
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The name of a wheel -> where the package in it is in this checkout.
PACKAGES = {"farfield": ROOT / "src" / "farfield", "farfield_papers": ROOT / "papers" / "src" / "farfield_papers"}
RECIPES = ROOT / "papers" / "recipes"
PROGRAM = """
import sys, torch, farfield
from farfield import cost, ops
from farfield.cli import main

assert farfield.__file__.startswith(sys.argv[1]), farfield.__file__
grid = torch.randn(1, 8, 6, 5)
for name, operator in ops.OPERATORS.items():
    learned = {each: torch.ones(shape) for each, shape in operator.parameter_shapes(8, 1).items()}
    assert getattr(ops, f"{name}_attention")(grid, grid, grid, **learned).shape == grid.shape
assert cost.predict("siamese", channels=8, size=(6, 5)).macs > 0
from farfield.testing import check_operator, reference
check_operator("siamese", reference.siamese)
from torch import nn
attention = farfield.nn.GridAttention(8, "factorized")
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), attention, nn.Conv2d(8, 1, 3)).double().eval()
volume = torch.randn(1, 70, 60, dtype=torch.float64)
whole, tiled = net(volume[None])[0].detach(), farfield.streaming.predict_whole(net, volume, tile=32)
torch.testing.assert_close(torch.as_tensor(tiled), whole)
print(sys.version, torch.__version__)
main(["measure", "--size", "6,5", "--repeats", "1"])
main(["operators"])
main(["kernels"])
"""
# With the wheel of the papers beside it.
PAPERS_PROGRAM = """
import sys, torch, farfield_papers
from farfield.cli import main
from farfield_papers import models

assert farfield_papers.__file__.startswith(sys.argv[1]), farfield_papers.__file__
assert models.kanet_qkv(width=0.25, num_classes=3)(torch.randn(2, 3, 32, 32)).shape == (2, 3)
main(["places", "--network", "kanet_qkv", "--size", "32,32"])
main(["recipes", "digits"])
main(["explore", "--no-open", "--size", "8", "--output", "page.html"])
"""


def missing(wheel: Path) -> list[str]:
    """Files of the package that a wheel lacks."""
    name = wheel.name.partition("-")[0]
    source = PACKAGES[name]
    files = {path.relative_to(source.parent).as_posix() for path in source.rglob("*") if path.is_file()}
    # A wheel has the library of kernels or the reason why there is none; a checkout may have the other.
    made = {f"farfield/ops/fast/cpu/{each}" for each in ("farfield_cpu.so", "not_built.txt")}
    if name == "farfield_papers":
        files |= {f"farfield_papers/recipes/{path.name}" for path in RECIPES.iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    lacking = sorted(each for each in files - made - names if "__pycache__" not in each)
    return lacking if name != "farfield" or made & names else [*lacking, " and ".join(sorted(made))]


def run_where_it_is(python: str, program: str, folder: str, variables: dict[str, str]) -> None:
    """Run what uses the package with this Python, which finds it in the folder."""
    # -P: not the folder of this command; the wheels stand before an editable installation.
    command = [python, "-P", "-c", program, folder]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, **variables})


def main() -> None:
    """Check the two wheels of a folder."""
    wheels = {path.name.partition("-")[0]: path for path in Path(sys.argv[1]).resolve().glob("*.whl")}
    if wheels.keys() != PACKAGES.keys():
        sys.exit(f"{sys.argv[1]} has {sorted(wheels)}, not one wheel of each of {', '.join(PACKAGES)}")
    for wheel in wheels.values():
        if lacks := missing(wheel):
            sys.exit(f"{wheel.name} lacks {', '.join(lacks)}")
    library, papers = (str(wheels[name]) for name in PACKAGES)
    pip = ["-m", "pip", "install", "-q"]
    with tempfile.TemporaryDirectory() as folder:
        for wheel, program in ((library, PROGRAM), (papers, PAPERS_PROGRAM)):
            subprocess.run([sys.executable, *pip, "--no-deps", "--target", folder, wheel], check=True)
            run_where_it_is(sys.executable, program, folder, {"PYTHONPATH": folder})
    for python in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([python, "-m", "venv", folder], check=True)
            of_it = f"{folder}/bin/python"
            # The library alone first, with what its volumes need.
            for wheel, program in ((f"{library}[stream]", PROGRAM), (papers, PAPERS_PROGRAM)):
                subprocess.run([of_it, *pip, wheel], check=True)
                subprocess.run([of_it, "-m", "pip", "check"], check=True)
                run_where_it_is(of_it, program, folder, {"PYTHONPATH": ""})
    print(f"{' and '.join(wheels[name].name for name in PACKAGES)} are whole and run")


if __name__ == "__main__":
    main()
