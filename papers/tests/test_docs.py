"""The pages keep their word: their Python runs, their commands and files exist."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / each / "README.md" for each in (".", "papers", "benchmarks")] + [ROOT / "CONTRIBUTING.md"]
PAGES += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "papers" / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if "_build" not in page.parts]


def fences(page: Path, *languages: str) -> list[tuple[int, str]]:
    """(line, code) of the fenced blocks of some languages."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    blocks = [token for token in tokens if token.type == "fence" and token.info.strip() in languages]
    return [(token.map[0] + 1, token.content) for token in blocks if token.map]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "python")], ids=name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One page is one program, in a folder where it may write.
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, code in fences(page, "python"):
        # Empty lines in front, so that a failure names the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_code_blocks_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nassert 1 == 1\nassert 1 == 2\n```\n", encoding="utf-8")
    [(line, code)] = fences(page, "python")
    with pytest.raises(AssertionError) as raised:
        exec(compile("\n" * line + code, str(page), "exec"), {})
    assert raised.traceback[-1].lineno + 1 == 5


def links(page: Path) -> list[str]:
    """Targets of the links of a page, without what follows a #."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    inside = [child for token in tokens for child in token.children or () if child.type == "link_open"]
    return [str(link.attrs["href"]).split("#")[0] for link in inside]


@pytest.mark.parametrize("page", [page for page in PAGES if links(page)], ids=name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    lost = [target for target in links(page) if not target.startswith("http") and not (page.parent / target).exists()]
    assert lost == []


COMMAND = re.compile(r"(?:^|\s)farfield ([a-z]\w*)")


@pytest.mark.parametrize("page", [page for page in PAGES if fences(page, "", "console", "bash")], ids=name)
def test_commands_and_recipes_of_the_pages_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from farfield.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert not stopped.value.code
    listed = capsys.readouterr().out
    for _, code in fences(page, "", "console", "bash"):
        for command in COMMAND.findall(code):
            found = re.search(rf"^ *{command}\b", listed, re.MULTILINE)
            assert found, f"{name(page)}: farfield --help lists no {command}"
        for recipe in re.findall(r"(?:papers/)?recipes/[\w.]+\.yaml", code):
            assert (ROOT / recipe).is_file(), f"{name(page)}: no {recipe}"
        for recipe in re.findall(r"--config (\w+)(?!\S)", code):
            assert (ROOT / "papers" / "recipes" / f"{recipe}.yaml").is_file(), f"{name(page)}: no recipe {recipe}"


def test_pictures_have_a_source() -> None:
    # The text of docs/pictures.py says what makes each picture.
    text = (ROOT / "docs/pictures.py").read_text(encoding="utf-8")
    named = re.findall(r"`(?:images/)?([a-z0-9*-]+\.(?:png|webp))`", text)
    pictures = {file.name for file in (ROOT / "docs/images").iterdir()}
    assert pictures == {picture for picture in pictures if any(fnmatch(picture, pattern) for pattern in named)}
    assert not [pattern for pattern in named if not any(fnmatch(picture, pattern) for picture in pictures)]
    assert all((ROOT / script).is_file() for script in re.findall(r"(?:papers/)?benchmarks/\w+\.py", text))


def test_pictures_have_a_description() -> None:
    # Readers without the picture get its text.
    for page in PAGES:
        images = [
            child for token in MarkdownIt().parse(page.read_text(encoding="utf-8")) for child in token.children or ()
        ]
        assert not [child.attrs["src"] for child in images if child.type == "image" and not child.content], page
