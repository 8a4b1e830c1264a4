"""Write build/conda/recipe.yaml: the recipe of a released archive, with its address, hash and page, and maintainers.

python conda/complete.py build/conda/farfield-X.Y.Z.tar.gz ADDRESS_OF_THE_ARCHIVE HOMEPAGE GITHUB_NAME...
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def complete_recipe(recipe: str, archive: Path, address: str, homepage: str, maintainers: list[str]) -> str:
    """Take the source from a released archive, and add the project's page and who looks after the recipe.

    Raises:
        ValueError: If the archive, or its address, is of another version than the recipe.
    """
    (version,) = re.findall(r'^  version: "(.+)"$', recipe, re.MULTILINE)
    wanted = f"farfield-{version}.tar.gz"
    for given in (archive.name, address.rpartition("/")[2]):
        if given != wanted:
            raise ValueError(f"{given} is not {wanted}, which conda/recipe.yaml describes")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    parts = {
        "source:\n  path: ..\n": f"source:\n  url: {address}\n  sha256: {digest}\n",
        "about:\n": f"about:\n  homepage: {homepage}\n",
    }
    for part, replacement in parts.items():
        if recipe.count(part) != 1:
            raise ValueError(f"conda/recipe.yaml has {part!r} {recipe.count(part)} times, not once")
        recipe = recipe.replace(part, replacement)
    return recipe + "\nextra:\n  recipe-maintainers:\n" + "".join(f"    - {name}\n" for name in maintainers)


def main() -> None:
    """Complete the recipe for the command line's archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("address")
    parser.add_argument("homepage")
    parser.add_argument("maintainers", nargs="+")
    given = parser.parse_args()
    recipe = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    complete = complete_recipe(recipe, given.archive, given.address, given.homepage, given.maintainers)
    written = ROOT / "build" / "conda" / "recipe.yaml"
    written.parent.mkdir(parents=True, exist_ok=True)
    written.write_text(complete, encoding="utf-8")
    print(written)


if __name__ == "__main__":
    main()
