"""Check a built wheel: every file of the package is in it, and it runs from where pip puts it. `make dist` runs this.

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

SOURCE = Path(__file__).parents[1] / "src"
PROGRAM = """
import sys, torch, farfield
from farfield import cost, models, ops
from farfield.cli import main

assert farfield.__file__.startswith(sys.argv[1]), farfield.__file__
grid = torch.randn(1, 8, 6, 5)
for name, operator in ops.OPERATORS.items():
    weight = {"weight": torch.ones(8)} if operator.score == "learned" else {}
    assert getattr(ops, f"{name}_attention")(grid, grid, grid, **weight).shape == grid.shape
assert models.kanet_qkv(width=0.25, num_classes=3)(torch.randn(2, 3, 32, 32)).shape == (2, 3)
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
main(["recipes", "digits"])
main(["explore", "--no-open", "--size", "8", "--output", "page.html"])
"""


def missing(wheel: Path) -> list[str]:
    """Files of the package that a wheel lacks."""
    files = {path.relative_to(SOURCE).as_posix() for path in (SOURCE / "farfield").rglob("*") if path.is_file()}
    # A wheel has the library or the reason why there is none; a checkout may have the other.
    made = {f"farfield/ops/fast/cpu/{name}" for name in ("farfield_cpu.so", "not_built.txt")}
    files |= {f"farfield/recipes/{path.name}" for path in (SOURCE.parent / "recipes").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        lacking = sorted(name for name in files - made - set(archive.namelist()) if "__pycache__" not in name)
        return lacking if made & set(archive.namelist()) else [*lacking, " and ".join(sorted(made))]


def run_where_it_is(python: str, folder: str, variables: dict[str, str]) -> None:
    """Run what uses the package with this Python, which finds it in the folder."""
    # -P: not the folder of this command; the wheel stands before an editable installation.
    command = [python, "-P", "-c", PROGRAM, folder]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, **variables})


def main() -> None:
    """Check the one wheel of a folder."""
    (wheel,) = Path(sys.argv[1]).resolve().glob("*.whl")
    if lacks := missing(wheel):
        sys.exit(f"{wheel.name} lacks {', '.join(lacks)}")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, str(wheel)]
        subprocess.run(pip, check=True)
        run_where_it_is(sys.executable, folder, {"PYTHONPATH": folder})
    for python in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([python, "-m", "venv", folder], check=True)
            of_it = f"{folder}/bin/python"
            # `explore` needs Pillow, of the extra `demo`, whose other packages are not wanted here.
            subprocess.run([of_it, "-m", "pip", "install", "-q", f"{wheel}[stream]", "Pillow"], check=True)
            subprocess.run([of_it, "-m", "pip", "check"], check=True)
            run_where_it_is(of_it, folder, {"PYTHONPATH": ""})
    print(f"{wheel.name} is whole and runs")


if __name__ == "__main__":
    main()
