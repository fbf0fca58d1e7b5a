"""The documents and their fenced blocks, for the tests that hold them true.

How a fenced block is treated is said by its info string:

- ``python test``, ``console test`` and ``bash test`` run in the order of the document, in one
  scratch folder;
- ``python file=NAME``, ``json file=NAME`` are written to that folder for the examples after them;
- ``console test=up`` starts the system (with free ports) for the examples after it;
- other ``python`` blocks must at least be syntax, other ``json`` blocks must parse.

In console blocks, lines that begin with ``$ `` are commands; the rest is what they print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(\s*)(`{3,})\s*([^\n`]*)$")


@dataclass(frozen=True)
class Example:
    """One fenced block: ``language`` and ``options`` come from its info string."""

    path: Path
    line: int
    language: str
    options: dict[str, str]
    text: str

    @property
    def where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a console block, continued lines joined."""
        joined = self.text.replace("\\\n", " ")
        return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


def documents() -> list[Path]:
    found = [*ROOT.glob("*.md")]
    for folder in ("docs", "blocks", "deploy", "tools", "blockflow"):
        found += (ROOT / folder).rglob("*.md")
    return sorted(found)


def examples(path: Path) -> Iterator[Example]:
    lines = path.read_text(encoding="utf-8").splitlines()
    i = 0
    while i < len(lines):
        match = FENCE.match(lines[i])
        if match is None:
            i += 1
            continue
        indent, fence, info = match.groups()
        start = i + 1
        i = start
        while i < len(lines) and lines[i].strip() != fence:
            i += 1
        words = info.split()
        options = {w.partition("=")[0]: w.partition("=")[2] for w in words[1:]}
        body = "\n".join(line.removeprefix(indent) for line in lines[start:i])
        yield Example(path, start, words[0] if words else "", options, body)
        i += 1


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def runs(example: Example) -> bool:
    return "test" in example.options
