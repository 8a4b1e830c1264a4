"""The site: built without a warning, read without a network, with every link within it leading somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from helpers.packs import unpack

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
FIRST_PAGE = 700_000  # bytes, with all that it loads, the explorer too


class Page(HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.equations = 0
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.equations += tag == "math"
        self.anchors |= {found[name] or "" for name in ("id", "name") if name in found}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"] or "")
        loads = {"script": "src", "img": "src", "iframe": "src", "link": "href"}.get(tag)
        if loads and found.get(loads) and found.get("rel") not in ("index", "search", "next", "prev", "canonical"):
            self.loaded.append((found[loads] or "").split("?")[0])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {file: Page(file) for file in sorted(site.rglob("*.html"))}


def test_nothing_is_loaded_from_the_network(pages: dict[Path, Page], site: Path) -> None:
    missing = [
        f"{file.relative_to(site)}: {name}"
        for file, page in pages.items()
        for name in page.loaded
        if not (file.parent / unquote(name)).is_file()
    ]
    assert not missing
    styles = "".join(style.read_text(encoding="utf-8") for style in site.rglob("*.css"))
    assert not re.findall(r"url\(\s*[\"']?https?:|@import", styles)


def test_links_lead_somewhere(pages: dict[Path, Page], site: Path) -> None:
    broken = []
    for file, page in pages.items():
        # Listings of sources lead back to the module that defines a name, and the API has it under its public name.
        links = [] if (site / "_modules") in file.parents else page.links
        for link in links:
            path, anchor = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", path):
                continue
            target = (file.parent / path).resolve() if path else file
            if target.suffix != ".html":
                assert target.is_file(), f"{file.relative_to(site)}: {link}"
            elif target not in pages or (anchor and anchor not in pages[target].anchors):
                broken.append(f"{file.relative_to(site)}: {link}")
    assert not broken


def test_the_first_page_is_light(pages: dict[Path, Page], site: Path) -> None:
    front = site / "index.html"
    loaded = {(front.parent / unquote(name)).resolve() for name in pages[front].loaded}
    assert front.stat().st_size + sum(file.stat().st_size for file in loaded) < FIRST_PAGE


def test_the_explorer_is_within_the_first_page_and_the_guide(pages: dict[Path, Page], site: Path) -> None:
    for page, explorer in ((site / "index.html", "explore.html"), (site / "guide" / "insert.html", "../explore.html")):
        assert pages[page].loaded.count(explorer) == 1
        assert re.search(r"<iframe [^>]*loading=.lazy", page.read_text(encoding="utf-8"))
    assert "explore.html" in pages[site / "index.html"].links
    assert (site / "explore.html").stat().st_size < 2_000_000


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run_and_hold_their_outputs(path: Path, tmp_path: Path, data: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    if path.stem == "insert_resnet" and not os.environ.get("IMAGENETTE"):
        archive = data / "classification" / "imagenette.tar.xz"
        if not archive.is_file():
            pytest.skip(f"needs images: IMAGENETTE is not set, and the data packs have no {archive.name}")
        # As imagenette/, where the notebook looks by itself.
        unpack(archive, tmp_path)
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell.outputs)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()


def test_equations_and_names_are_typeset_and_linked(pages: dict[Path, Page], site: Path) -> None:
    operators = pages[site / "guide" / "operators.html"]
    assert operators.equations >= 12
    assert "../api/nn.html#farfield.nn.GridAttention" in operators.links
    assert "../api/cost.html#farfield.cost.predict" in operators.links
