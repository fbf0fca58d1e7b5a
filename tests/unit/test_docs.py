"""The documents are true: examples run, links lead somewhere, commands exist.

How a fenced block is treated is said by its info string:

- ``python test``, ``console test`` and ``bash test`` run in the order of the document, in one
  scratch folder;
- ``python file=NAME``, ``json file=NAME`` are written to that folder for the examples after them;
- ``console test=up`` starts the system (with free ports) for the examples after it;
- other ``python`` blocks must at least be syntax, other ``json`` blocks must parse.

In console blocks, lines that begin with ``$ `` are commands; the rest is what they print.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from blockflow.bench.demo.server import Server
from blockflow.cli.main import COMMANDS
from blockflow.core.lifecycle import diagram
from blockflow.monitor.rest import RestClient

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 90
_FENCE = re.compile(r"^(\s*)(`{3,})\s*([^\n`]*)$")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")


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
        match = _FENCE.match(lines[i])
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


def prose(path: Path) -> str:
    """The document without its fenced blocks and inline code, where brackets are no links."""
    out, inside = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _FENCE.match(line)
        if inside:
            inside = "" if line.strip() == inside else inside
        elif match is not None:
            inside = match.group(2)
        else:
            out.append(line)
    return re.sub(r"`[^`\n]*`", "", "\n".join(out))


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of the headings."""
    out = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _HEADING.match(line)
        if match:
            text = re.sub(r"[^\w\- ]", "", match.group(1).replace("`", "").lower())
            out.add(text.replace(" ", "-"))
    return out


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def runs(example: Example) -> bool:
    return "test" in example.options


@pytest.mark.parametrize("path", documents(), ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    dead = []
    for target in _LINK.findall(prose(path)):
        if re.match(r"^[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            dead.append(f"{target}: no such file")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            dead.append(f"{target}: no such heading")
    assert not dead, f"{name(path)}: {dead}"


@pytest.mark.parametrize("path", documents(), ids=name)
def test_examples_are_well_formed(path: Path) -> None:
    for example in examples(path):
        if example.language == "python":
            ast.parse(example.text, filename=example.where)
        elif example.language == "json":
            try:
                json.loads(example.text)
            except ValueError as exc:
                pytest.fail(f"{example.where}: {exc}")


@pytest.mark.parametrize("path", documents(), ids=name)
def test_commands_exist(path: Path) -> None:
    for example in examples(path):
        if example.language != "console":
            continue
        for command in example.commands:
            words = shlex.split(command, comments=True)
            if words and words[0] == "blockflow" and not words[1].startswith("-"):
                assert words[1] in COMMANDS, f"{example.where}: {command}"


def test_the_readme_begins_with_demo_and_test() -> None:
    commands = [c for e in examples(ROOT / "README.md") for c in e.commands]
    assert [shlex.split(c, comments=True) for c in commands[:2]] == [
        ["make", "demo"],
        ["make", "test"],
    ]


def test_the_life_cycle_is_drawn_from_its_table() -> None:
    drawn = [e.text for e in examples(ROOT / "docs/architecture.md") if e.language == "mermaid"]
    assert diagram() in drawn, f"put this into docs/architecture.md:\n{diagram()}"


RUNNABLE = [p for p in documents() if any(runs(e) for e in examples(p))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    environment = command_environment(tmp_path / "bin")
    with ExitStack() as stack:
        for example in examples(path):
            if "file" in example.options:
                (work / example.options["file"]).write_text(example.text + "\n", encoding="utf-8")
            elif example.options.get("test") == "up":
                (tmp_path / "up").mkdir()
                (work / "blocks").mkdir(exist_ok=True)
                server = stack.enter_context(Server(work / "blocks", tmp_path / "up", RestClient))
                server.start()
                environment["BLOCKFLOW_URL"] = server.rest_url
                environment["BLOCKFLOW_ADDRESS"] = server.client_address
            elif runs(example):
                run_example(example, work, environment)


def run_example(example: Example, work: Path, environment: dict[str, str]) -> None:
    if example.language == "python":
        command = [sys.executable, "-c", example.text]
    else:
        assert example.language in ("console", "bash"), f"{example.where}: cannot be run"
        lines = example.commands if example.language == "console" else [example.text]
        command = ["bash", "-ec", "\n".join(lines)]
    done = subprocess.run(
        command,
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{example.where}\n{done.stdout}\n{done.stderr}"


def command_environment(folder: Path) -> dict[str, str]:
    """PATH with this interpreter as ``python`` and a ``blockflow`` of this very checkout."""
    folder.mkdir()
    for command, call in (("python", ""), ("blockflow", "-m blockflow.cli.main ")):
        script = folder / command
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {call}"$@"\n')
        script.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
    }


# The detectors see what they are there for.


def test_planted_faults_are_found(tmp_path: Path) -> None:
    document = tmp_path / "planted.md"
    document.write_text(
        "# A heading: *here*\n\n[gone](missing.md) and `[no](link)`\n\n"
        "```console test=up\n$ blockflow up \\\n    --port 0\nready\n```\n"
        "```python file=a.py\nx = [1](2)\n```\n",
        encoding="utf-8",
    )
    console, code = examples(document)
    assert console.options == {"test": "up"}
    assert console.commands == ["blockflow up      --port 0"]
    assert code.options == {"file": "a.py"}
    assert _LINK.findall(prose(document)) == ["missing.md"]
    assert anchors(document) == {"a-heading-here"}
