"""The documents are true: links lead somewhere, commands exist, examples are well formed."""

from __future__ import annotations

import ast
import json
import re
import shlex
from configparser import ConfigParser
from functools import cache
from itertools import chain
from pathlib import Path

from docs_rig import FENCE, ROOT, documents, examples, name

from blockflow.cli import lazy
from blockflow.cli.bench import BenchCommands
from blockflow.cli.main import COMMANDS, load
from blockflow.core import limits
from blockflow.core.lifecycle import diagram

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_CALL = re.compile(r"\bblockflow (bench thesis|[a-z]+)([^`\n|#]*)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")


def prose(path: Path) -> str:
    """The document without its fenced blocks and inline code, where brackets are no links."""
    out, inside = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        match = FENCE.match(line)
        if inside:
            inside = "" if line.strip() == inside else inside
        elif match is not None:
            inside = match.group(2)
        else:
            out.append(line)
    return re.sub(r"`[^`\n]*`", "", "\n".join(out))


@cache
def anchors(path: Path) -> set[str]:
    """GitHub's anchors of the headings."""
    out = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        match = _HEADING.match(line)
        if match:
            text = re.sub(r"[^\w\- ]", "", match.group(1).replace("`", "").lower())
            out.add(text.replace(" ", "-"))
    return out


def test_links_lead_somewhere() -> None:
    dead = []
    for path in documents():
        for target in _LINK.findall(prose(path)):
            if re.match(r"^[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if not there.exists():
                dead.append(f"{name(path)}: {target}: no such file")
            elif anchor and there.suffix == ".md" and anchor not in anchors(there):
                dead.append(f"{name(path)}: {target}: no such heading")
    assert not dead


def test_a_source_distribution_has_what_the_documents_lead_to() -> None:
    taken = {"README.md", "LICENSE", "pyproject.toml", "blockflow"}  # by setuptools itself
    for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines():
        if line.startswith(("include ", "graft ")):
            taken.update(one.split("/")[0] for one in line.split()[1:])
    led = {"Makefile", "constraints.txt", "tests", "tools"}
    for path in documents():
        for target in _LINK.findall(prose(path)):
            if not re.match(r"^[a-z]+:|#", target):
                there = (path.parent / target.partition("#")[0]).resolve()
                led.add(there.relative_to(ROOT).parts[0])
    assert led <= taken


def test_examples_are_well_formed() -> None:
    bad = []
    for example in chain.from_iterable(map(examples, documents())):
        try:
            if example.language == "python":
                ast.parse(example.text, filename=example.where)
            elif example.language == "json":
                json.loads(example.text)
        except (SyntaxError, ValueError) as exc:
            bad.append(f"{example.where}: {exc}")
    assert not bad


def test_commands_exist() -> None:
    unknown = []
    for example in chain.from_iterable(map(examples, documents())):
        for command in example.commands if example.language == "console" else ():
            words = shlex.split(command, comments=True)
            if words[:1] == ["blockflow"] and words[1] not in COMMANDS and words[1][0] != "-":
                unknown.append(f"{example.where}: {command}")
    assert not unknown


def test_options_exist() -> None:
    unknown = [
        f"{name(path)}: {option}"
        for path in documents()
        for option in unknown_options(path.read_text(encoding="utf-8"))
    ]
    assert not unknown


def test_the_unit_of_systemd_starts_what_there_is() -> None:
    """And gives it a state folder that systemd makes, and a stop that loses nothing in flight."""
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(ROOT / "deploy" / "blockflow.service", encoding="utf-8")
    service = unit["Service"]
    program, command, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("blockflow", "up")
    args = load("up").make_context("up", words).params
    assert args["state_dir"] == "/var/lib/" + service["StateDirectory"]
    assert (service["KillMode"], service["Restart"]) == ("mixed", "on-failure")


def unknown_options(text: str) -> list[str]:
    """What a text gives the commands that they do not take, in examples and in the prose."""
    calls = _CALL.findall(text.replace("\\\n", " "))
    return [
        f"blockflow {command} {option}"
        for command, rest in calls
        for option in _OPTION.findall(rest)
        if command.split()[0] in COMMANDS and option not in options_of(command)
    ]


@cache
def options_of(command: str) -> set[str]:
    found = load(command) if command in COMMANDS else lazy.load(BenchCommands.entries, "thesis")
    return {"--help", *(option for p in found.params for option in (*p.opts, *p.secondary_opts))}


def test_the_readme_begins_with_demo_and_test() -> None:
    commands = [c for e in examples(ROOT / "README.md") for c in e.commands]
    assert [shlex.split(c, comments=True) for c in commands[:2]] == [
        ["make", "demo"],
        ["make", "test"],
    ]


def test_the_life_cycle_is_drawn_from_its_table() -> None:
    drawn = [e.text for e in examples(ROOT / "docs/architecture.md") if e.language == "mermaid"]
    assert diagram() in drawn, f"put this into docs/architecture.md:\n{diagram()}"


def test_every_environment_variable_is_told() -> None:
    code = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "blockflow").rglob("*.py"))
    found = set(re.findall(r"\bBLOCKFLOW_[A-Z_]+\b", code))
    between_processes = {"BLOCKFLOW_LIFELINE_FD", "BLOCKFLOW_CHAOS_RUN"}
    told = "".join(path.read_text(encoding="utf-8") for path in documents())
    untold = {name for name in found if f"`{name}" not in told and f"${name}" not in told}
    assert untold == between_processes


def test_the_bounds_of_a_topology_are_those_that_are_checked() -> None:
    page = " ".join((ROOT / "docs/control-plane.md").read_text(encoding="utf-8").split())
    assert (
        f"{limits.MAX_BLOCKS:,} blocks of {limits.MAX_REPLICAS} replicas (as far as the "
        f"[descriptors](reliability.md#descriptors) go) and {limits.MAX_TASKS:,} tasks, "
        f"{limits.MAX_PATH_NODES} blocks in a path, and {limits.MAX_TASKS_PER_REQUEST} tasks in a "
        f"request. A name has up to {limits.MAX_NAME_CHARS} letters"
    ) in page


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
    assert unknown_options(
        "`blockflow bench thesis --quick --fast` and\n$ blockflow up \\\n --prot"
    ) == [
        "blockflow bench thesis --fast",
        "blockflow up --prot",
    ]
    assert _LINK.findall(prose(document)) == ["missing.md"]
    assert anchors(document) == {"a-heading-here"}
