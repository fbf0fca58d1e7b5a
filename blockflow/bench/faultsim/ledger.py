"""SeedLedger: seeds that have been run, so that hours of them can be run bit by bit."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from blockflow.bench.faultsim.outcome import Found

_NOT_SIMULATED = (
    "blockflow.bench.faultsim.run",
    "blockflow.bench.faultsim.ledger",
    "blockflow.bench.faultsim.rows",
    "blockflow.bench.git",
    "blockflow.bench.results",
    "blockflow.repository.machine",
)
"""They start runs, or show what came of them."""


def simulated() -> dict[str, Path]:
    """The modules of this project that a simulated run consists of, with their files."""
    found = {}
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None)
        if file and name.partition(".")[0] == "blockflow" and name not in _NOT_SIMULATED:
            found[name] = Path(file)
    return found


def code_digest(modules: Mapping[str, Path]) -> str:
    """Of what they do: what one state of the code has passed says nothing of another, but hours of
    runs are not lost for a comment, a docstring or the layout."""
    digest = hashlib.sha256()
    for name, path in sorted(modules.items()):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [x for x in body if not _is_text(x)]  # type: ignore[attr-defined]
        digest.update(name.encode() + b"\0" + ast.dump(tree).encode() + b"\0")
    return digest.hexdigest()


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, or a string that says something of the constant above it."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


class SeedLedger:
    """Runs that kept every invariant, one JSON line each.

    Args:
        path: of the file; it is made with the first run.
        code: digest of what runs.
        hours, kinds: of the runs; others in the file do not count, nor do those of other code.
    """

    def __init__(self, path: Path, code: str, hours: float, kinds: Sequence[str]) -> None:
        self._path = path
        self._key = {"code": code, "asked_hours": hours, "kinds": list(kinds)}

    def read(self) -> dict[int, Found]:
        """Seed -> what was found. A torn line, of a run that was cut off, is passed over."""
        found: dict[int, Found] = {}
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["key"] == self._key:
                    one = Found(**entry["found"])
                    found[one.seed] = one
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def add(self, one: Found) -> None:
        """Remember a run; one that broke an invariant is to be run again."""
        if one.rule:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.exists() and self._path.read_bytes()[-1:] != b"\n"
        with self._path.open("a") as f:
            f.write("\n" * torn + json.dumps({"key": self._key, "found": asdict(one)}) + "\n")
