"""Small texts for tests: few words in an order that can be learned."""

from __future__ import annotations

import random
from pathlib import Path

NOUNS = ("whale", "ship", "captain", "sea", "harpoon", "sailor")
VERBS = ("sees", "follows", "fears", "hunts")


def sentences(number: int, seed: int = 0) -> list[str]:
    """Lines of one pattern."""
    draw = random.Random(seed)
    return [f"the {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)} ." for _ in range(number)]


def make_texts(folder: Path, parts: dict[str, int] | None = None) -> Path:
    """Write a file of so many lines into each part, or three files into the folder itself."""
    files = {f"{name}/{name}.txt": number for name, number in parts.items()} if parts else {}
    files = files or {"a.txt": 60, "deeper/b.txt": 80, "c.TXT": 40}
    for place, (name, number) in enumerate(files.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(sentences(number, place)) + "\n", encoding="utf-8")
    return folder
