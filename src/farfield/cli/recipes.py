"""`farfield recipes`: the training configurations that farfield ships; `--config` finds them by name.

farfield recipes                          # the list, with the cost and the result of each
farfield recipes imagenette               # the recipe itself
farfield recipes --copy imagenette        # a copy in this folder, to change
farfield fit --config imagenette
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import farfield
from farfield.cli.command_parser import CommandParser
from farfield.cli.output import Row, Table, add_formats, show

SUFFIX = ".yaml"
# The fields of the comment at the top of a recipe.
FIELDS = {"Paper": "paper", "To reach": "to_reach", "Takes": "takes", "Differs": "differs", "Data": "data"}
FIELD = re.compile(rf"^# ({'|'.join(FIELDS)}): +(.*)$")


class Recipe(NamedTuple):
    """A recipe, as the comment at its top describes it.

    Attributes:
        name: Its name.
        task: The task of the training.
        what: What is trained, and on what.
        fields: The fields that its comment has, under the values of `FIELDS`, such as "to_reach".
    """

    name: str
    task: str
    what: str
    fields: dict[str, str]


def folder() -> Path:
    """Return the folder of the recipes: in the installed package, or beside `src` in a checkout."""
    package = Path(farfield.__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def recipe_files() -> dict[str, Path]:
    """Return the file of each recipe by its name."""
    return {path.stem: path for path in sorted(folder().glob(f"*{SUFFIX}"))}


def find_configuration(value: str, caller: str = "farfield fit") -> str:
    """Return the path of a configuration: that of the recipe of this name if there is one, otherwise the value itself.

    Args:
        value: What follows `--config`: the name of a recipe, or a path; "./digits" is never a recipe.
        caller: The command that the error names.

    Returns:
        The path.

    Raises:
        LookupError: If there is no such file and no such recipe; the text has the nearest names.

    Example:
        >>> Path(find_configuration("digits")).name
        'digits.yaml'
    """
    files = recipe_files()
    if value in files:
        return str(files[value])
    if Path(value).is_file():
        return value
    if value.removesuffix(SUFFIX) in files:
        return str(files[value.removesuffix(SUFFIX)])
    # Imported here: it loads torch, which a list of recipes does not need.
    from farfield._checks import unknown

    raise unknown(caller, "recipe or file", value, files)


def read_recipe(path: Path) -> Recipe:
    """Read the comment at the top of a recipe, and its task."""
    what: list[str] = []
    fields: dict[str, list[str]] = {}
    current = what
    text = path.read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        match = FIELD.match(line)
        if match:
            current = fields.setdefault(FIELDS[match[1]], [])
            line = match[2]
        elif current is not what and not line.startswith("#     "):
            current = []  # the lines below the fields: commands of variants
        current.append(line.lstrip("# "))
    task = re.search(r"^task: *(\w+)", text, re.MULTILINE)
    joined = {key: " ".join(" ".join(lines).split()) for key, lines in fields.items()}
    return Recipe(path.stem, task[1] if task else "classify", " ".join(" ".join(what).split()), joined)


def rows() -> list[Row]:
    """Return one row for each recipe."""
    recipes = [read_recipe(path) for path in recipe_files().values()]
    return [
        {"name": each.name, "task": each.task, "what": each.what, **dict.fromkeys(FIELDS.values()), **each.fields}
        for each in recipes
    ]


def copy(path: Path, target: Path) -> Path:
    """Copy a recipe to a folder, never over a file.

    Raises:
        FileExistsError: If the folder has a file of this name.
        FileNotFoundError: If there is no such folder.
    """
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


def main(argv: Sequence[str] | None = None) -> None:
    """List the recipes, print one, or copy one.

    Args:
        argv: The command line without the program's name; None takes it from the system.

    Raises:
        SystemExit: With status 2 for a wrong option.
        LookupError: For an unknown recipe.
        FileExistsError: For a copy that would replace a file.
        FileNotFoundError: For a copy to a folder that does not exist.
    """
    parser = CommandParser("farfield recipes", __doc__, raw=True)
    parser.add_argument("name", nargs="?", help="print this recipe")
    parser.add_argument("--copy", metavar="NAME", help="copy a recipe, to change it")
    parser.add_argument("--to", type=Path, default=Path(), metavar="FOLDER", help="where the copy goes (default: here)")
    add_formats(parser)
    options = parser.parse_args(argv)
    if options.copy:
        path = Path(find_configuration(options.copy, "farfield recipes"))
        print(f"farfield recipes: {copy(path, options.to)}; farfield fit --config with this path runs it.")
    elif options.name:
        path = Path(find_configuration(options.name, "farfield recipes"))
        sys.stdout.write(path.read_text(encoding="utf-8"))
    elif options.json or options.csv:
        show(Table("Recipes", [], rows()), options)
    else:
        print("\n".join(listing([read_recipe(path) for path in recipe_files().values()])))


def listing(recipes: Sequence[Recipe]) -> list[str]:
    """Format the training, the cost and the result of each recipe, up to 160 characters wide, as the terminal is."""
    width = max(len(recipe.name) for recipe in recipes) + 2
    wrap = textwrap.TextWrapper(min(shutil.get_terminal_size((120, 24)).columns, 160), subsequent_indent=" " * width)
    lines = []
    for recipe in recipes:
        lines += wrap.wrap(f"{recipe.name:{width}}{recipe.what}")
        for key, heading in (("takes", "takes"), ("to_reach", "reaches")):
            if key in recipe.fields:
                lines += wrap.wrap(f"{'':{width}}{heading}: {recipe.fields[key]}")
    return [
        *lines,
        "",
        "farfield fit --config NAME runs one, farfield recipes NAME prints it, --copy NAME copies it here.",
    ]
