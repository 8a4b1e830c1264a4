"""Pages, words, links and blocks of code of the documentation, page by page and in all.

python benchmarks/words.py            # this checkout
python benchmarks/words.py ../before  # another one

Words are those of prose and tables, and of the text cells of notebooks; *all* counts code, addresses and marks of
tables too, as `wc -w` does. A page that only includes another one does not count.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^ *(`{3,}|~{3,})([^`\n]*)\n(.*?)^ *\1 *$", re.MULTILINE | re.DOTALL)
GROUPS = {
    "docs": "docs/**/*.md",
    "docs/tutorials": "docs/tutorials/*.ipynb",
    "docs/api": "docs/api/*.md",
    "papers/docs": "papers/docs/*.md",
    "README": "README.md",
    "CONTRIBUTING": "CONTRIBUTING.md",
    "papers/README": "papers/README.md",
    "benchmarks/README": "benchmarks/README.md",
}


def read_text(path: Path) -> tuple[str, int]:
    """Return the Markdown of a page, and how many code cells it has beside."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8"), 0
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return text, sum(cell["cell_type"] == "code" for cell in cells)


def count_page(path: Path) -> tuple[int, int, int, int]:
    """Return words, all of them, links and blocks of code."""
    text, blocks = read_text(path)
    everything = len(text.split())
    code = [found for found in FENCE.finditer(text) if not found[2].strip().startswith("{")]
    blocks += len(code)
    for found in code:
        text = text.replace(found[0], "")
    links = len(re.findall(r"(?<!!)\[[^\]]*\]\([^)]+\)|:link: ", text))
    text = re.sub(r"\]\([^)]*\)|<[^>]*>|^ *(`{3,}|:{3,}).*$|^:\w+:.*$", " ", text, flags=re.MULTILINE)
    return sum(bool(re.search(r"\w", word)) for word in text.split()), everything, links, blocks


def main() -> None:
    """Print a line a page and a line a group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    root = parser.parse_args().root
    print(f"{'':42}{'pages':>6}{'words':>8}{'all':>8}{'links':>7}{'code':>6}")
    for group, pattern in GROUPS.items():
        pages = [page for page in sorted(root.glob(pattern)) if not {"_build", "auto_gallery"} & set(page.parts)]
        pages = [page for page in pages if group != "docs" or page.parent.name != "api"]
        pages = [page for page in pages if not read_text(page)[0].startswith("```{include}")]
        counts = [count_page(page) for page in pages]
        total = [sum(column) for column in zip(*counts, strict=True)] or [0] * 4
        for page, (words, everything, links, blocks) in zip(pages, counts, strict=True):
            if len(pages) > 1:
                print(f"  {page.relative_to(root)!s:40}{'':>6}{words:8,}{everything:8,}{links:7}{blocks:6}")
        print(f"{group:42}{len(pages):6}{total[0]:8,}{total[1]:8,}{total[2]:7}{total[3]:6}")


if __name__ == "__main__":
    main()
