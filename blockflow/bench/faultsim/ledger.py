"""SeedLedger: seeds that have been run, so that hours of them can be run bit by bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import blockflow
from blockflow.bench.faultsim.outcome import Found


def code_digest(root: Path = Path(blockflow.__file__).parent) -> str:
    """Of the whole package: what one state of the code has passed says nothing of another."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


class SeedLedger:
    """Runs that kept every invariant, one JSON line each.

    Args:
        path: of the file; it is made with the first run.
        hours, kinds: of the runs; others in the file do not count, nor do those of other code.
    """

    def __init__(self, path: Path, hours: float, kinds: Sequence[str]) -> None:
        self._path = path
        self._key = {"code": code_digest(), "asked_hours": hours, "kinds": list(kinds)}

    def read(self) -> dict[int, Found]:
        """Seed -> what was found. A torn line, of a run that was cut off, is passed over."""
        found: dict[int, Found] = {}
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
                if entry["key"] == self._key:
                    one = Found.from_dict(entry["found"])
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
            f.write("\n" * torn + json.dumps({"key": self._key, "found": one.to_dict()}) + "\n")
