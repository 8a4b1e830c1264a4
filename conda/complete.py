"""Write build/conda/recipe.yaml: the recipe with the hash of a released archive and the recipe's maintainers.

python conda/complete.py build/conda/farfield-X.Y.Z.tar.gz GITHUB_NAME...
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def complete_recipe(recipe: str, archive: Path, maintainers: list[str]) -> str:
    """Add the archive's SHA-256 below its address, and the persons who look after the recipe.

    Raises:
        ValueError: If the archive is of another version than the recipe.
    """
    (version,) = re.findall(r'^  version: "(.+)"$', recipe, re.MULTILINE)
    if archive.name != f"farfield-{version}.tar.gz":
        raise ValueError(f"{archive.name} is not farfield-{version}.tar.gz, which conda/recipe.yaml describes")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    hashed, count = re.subn(r"^(  url: .+)$", rf"\1\n  sha256: {digest}", recipe, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"conda/recipe.yaml has {count} addresses of sources, not one")
    return hashed + "\nextra:\n  recipe-maintainers:\n" + "".join(f"    - {name}\n" for name in maintainers)


def main() -> None:
    """Complete the recipe for the command line's archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("maintainers", nargs="+")
    arguments = parser.parse_args()
    recipe = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    complete = complete_recipe(recipe, arguments.archive, arguments.maintainers)
    written = ROOT / "build" / "conda" / "recipe.yaml"
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(complete, encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
