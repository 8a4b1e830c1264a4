"""What a release states in several places agrees: the version, and what conda's recipe repeats of pyproject.toml."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import farfield

ROOT = Path(__file__).parents[1]
PAGE = "https" + "://example.org"
# Python's name of a package -> conda's, where they differ.
CONDA = {"torch": "pytorch", "xxhash": "python-xxhash"}


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def recipe(text: str | None = None) -> dict[str, Any]:
    return yaml.safe_load(read("conda/recipe.yaml") if text is None else text)


def project() -> dict[str, Any]:
    return tomllib.loads(read("pyproject.toml"))["project"]


def in_conda(requirements: list[str]) -> list[str]:
    """The requirements in conda's words."""
    parsed = [Requirement(each) for each in requirements]
    assert not any(each.extras or each.marker for each in parsed)
    return [f"{CONDA.get(each.name, each.name)} {each.specifier}" for each in parsed]


def test_versions_agree() -> None:
    version = farfield.__version__
    assert f"\nversion: {version}\n" in read("CITATION.cff")
    assert f"version = {{{version}}}," in read("README.md")
    assert f"farfield-{version}-py3-none-any.whl" in read("docs/index.md")
    assert recipe()["context"]["version"] == version
    (date,) = re.findall(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", read("CHANGELOG.md"), re.MULTILINE)
    assert f'\ndate-released: "{date}"\n' in read("CITATION.cff")


# ---- the recipe of conda-forge ---------------------------------------------------------------------------------------
def test_the_recipe_requires_what_the_project_does() -> None:
    required = recipe()["requirements"]
    wanted = [*project()["dependencies"], *project()["optional-dependencies"]["stream"]]
    assert required["run"] == ["python", *in_conda(wanted)]
    backend = tomllib.loads(read("pyproject.toml"))["build-system"]["requires"]
    assert required["host"][:3] == ["python", "pip", *in_conda(backend)]
    assert {"if": "linux", "then": "pytorch >=2.11"} in required["host"]
    assert "pytorch >=2.11" in required["run"]


def test_the_recipe_is_of_the_pythons_of_the_project() -> None:
    oldest, newest = project()["requires-python"].split(",")
    opposite = {">=": "<", "<": ">="}
    skipped = [re.sub(r"^(>=|<)", lambda found: opposite[found[0]], each) for each in (oldest, newest)]
    assert recipe()["build"]["skip"] == [f'match(python, "{each}")' for each in skipped]


def test_the_recipe_is_of_this_license() -> None:
    about = recipe()["about"]
    assert (about["license"], [about["license_file"]]) == (project()["license"], project()["license-files"])


def complete() -> ModuleType:
    specification = importlib.util.spec_from_file_location("complete", ROOT / "conda" / "complete.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_completed_recipe_has_what_conda_forge_asks_for(tmp_path: Path) -> None:
    archive = tmp_path / f"farfield-{farfield.__version__}.tar.gz"
    archive.write_bytes(b"an archive")
    address, homepage = f"{PAGE}/{archive.name}", PAGE
    text = complete().complete_recipe(read("conda/recipe.yaml"), archive, address, homepage, ["first", "second"])
    found = recipe(text)
    assert (found["source"]["url"], found["about"]["homepage"]) == (address, homepage)
    assert found["source"]["sha256"] == hashlib.sha256(b"an archive").hexdigest()
    assert found["extra"]["recipe-maintainers"] == ["first", "second"]
    # What the linter of conda-forge asks for: sections and their order, a build number, tests, about, one empty line.
    order = ["schema_version", "context", "package", "source", "build", "requirements", "tests", "about", "extra"]
    assert list(found) == order
    assert found["build"]["number"] == 0
    assert found["tests"]
    assert {"homepage", "license", "license_file", "summary"} <= set(found["about"])
    assert list(found["requirements"])[:3] == ["build", "host", "run"]
    assert text.endswith("second\n")
    rest = {key: value for key, value in found.items() if key != "extra"}
    rest["source"] = {"path": ".."}
    del rest["about"]["homepage"]
    assert rest == recipe()


def test_an_archive_of_another_version_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "farfield-9.9.9.tar.gz"
    archive.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"9\.9\.9.*{re.escape(farfield.__version__)}"):
        complete().complete_recipe(read("conda/recipe.yaml"), archive, f"{PAGE}/{archive.name}", PAGE, ["first"])
