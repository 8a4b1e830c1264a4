"""`farfield recipes`: the training configurations that farfield ships; `--config` finds them by name."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import farfield_papers
from farfield._refusals import door, refusal
from farfield.cli.output import Row, Table, show
from farfield.cli.values import no_such
from farfield_papers.cli.printed import SCORES

_SUFFIX = ".yaml"
# The fields of the comment at the top of a recipe.
_FIELDS = {"Paper": "paper", "To reach": "to_reach", "Takes": "takes", "Differs": "differs", "Data": "data"}
# One of them, over several lines; the lines below the fields are commands of variants.
_FIELD = re.compile(rf"^({'|'.join(_FIELDS)}): +(.*(?:\n {{4}}.*)*)", re.MULTILINE)


def recipe_files() -> dict[str, Path]:
    """Return the file of each recipe by its name: in the installed package, or beside `src` in a checkout."""
    package = Path(farfield_papers.__file__).parent
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob(f"*{_SUFFIX}"))}


def find_configuration(value: str) -> str:
    """Return the path of a configuration: of the recipe of this name if there is one, else the value itself."""
    files = recipe_files()
    if value in files:
        return str(files[value])
    if Path(value).is_file():
        return value
    if value.removesuffix(_SUFFIX) in files:
        return str(files[value.removesuffix(_SUFFIX)])
    if (file := Path(value) / "config.yaml").is_file():
        raise refusal(LookupError, f'"{value}" is the folder of a run; fix: --config {file}.')
    raise refusal(LookupError, no_such("recipe or file", value, files))


def _read_recipe(path: Path) -> Row:
    """Read the comment at the top of a recipe, and its task."""
    text = path.read_text(encoding="utf-8")
    comment = "\n".join(
        line.removeprefix("#")[1:] for line in takewhile(lambda line: line[:1] == "#", text.splitlines())
    )
    task, fields = re.search(r"^task: *(\w+)", text, re.MULTILINE), dict(_FIELD.findall(comment))
    found = {"what": _FIELD.split(comment)[0]} | {key: fields.get(name) for name, key in _FIELDS.items()}
    row: Row = {"name": path.stem, "task": task[1] if task else "classify"}
    return row | {key: each and " ".join(each.split()) for key, each in found.items()}


def _printed_scores(name: str) -> dict[str, dict[str, str]]:
    """Return options of a recipe -> measure -> the score that a paper prints for them."""
    if scores := SCORES.get(name):
        return {options: dict(zip(scores.measures, row, strict=True)) for options, row in scores.rows.items()}
    return {}


def _copy(path: Path, target: Path) -> Path:
    """Copy a recipe to a folder, never over a file."""
    copied = target / path.name
    try:
        with copied.open("x", encoding="utf-8") as file:
            file.write(path.read_text(encoding="utf-8"))
    except FileExistsError:
        raise FileExistsError(
            f"farfield recipes: {copied} exists and is not replaced; fix: remove it, or --to another folder."
        ) from None
    except FileNotFoundError as error:
        raise FileNotFoundError(f"farfield recipes: there is no folder {target}; fix: make it first.") from error
    return copied


def show_recipes(
    name: str | None = None,
    *,
    copy: str | None = None,
    to: Path = Path("."),
    json: bool = False,
    csv: bool = False,
) -> None:
    """List the recipes, with the cost and the result of each; print one, or copy one.

        farfield recipes
        farfield recipes imagenette
        farfield recipes --copy imagenette
        farfield fit --config imagenette

    Args:
        name: Print this recipe.
        copy: Copy a recipe, to change it.
        to: The folder that the copy is written to.
        json: Print a JSON list with one object per row, raw values; also the scores that the papers print.
        csv: Print comma-separated raw values.
    """
    if copy:
        with door("farfield recipes"):
            path = Path(find_configuration(copy))
        print(f"farfield recipes: {_copy(path, to)}; farfield fit --config with this path runs it.")
    elif name:
        with door("farfield recipes"):
            path = Path(find_configuration(name))
        sys.stdout.write(path.read_text(encoding="utf-8"))
    else:
        rows = [_read_recipe(path) for path in recipe_files().values()]
        if json:
            rows = [row | {"printed": _printed_scores(row["name"])} for row in rows]
        if json or csv:
            show(Table("Recipes", [], rows), json=json, csv=csv)
        else:
            print("\n".join(_list_recipes(rows)))


def _list_recipes(recipes: Sequence[Row]) -> list[str]:
    """Format the training, the cost and the result of each recipe, up to 160 characters wide, as the terminal is."""
    width = max(len(recipe["name"]) for recipe in recipes) + 2
    wrap = textwrap.TextWrapper(min(shutil.get_terminal_size((120, 24)).columns, 160), subsequent_indent=" " * width)
    lines = []
    for recipe in recipes:
        lines += wrap.wrap(f"{recipe['name']:{width}}{recipe['what']}")
        for key, heading in (("takes", "takes"), ("to_reach", "reaches")):
            if recipe[key]:
                lines += wrap.wrap(f"{'':{width}}{heading}: {recipe[key]}")
    return [
        *lines,
        "",
        "farfield fit --config NAME runs one, farfield recipes NAME prints it, --copy NAME copies it here.",
    ]
