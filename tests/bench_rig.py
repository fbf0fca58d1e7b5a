"""A benchmark run from end to end, as its make target runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from blockflow.bench.results import Figure, ResultFile

ROOT = Path(__file__).resolve().parents[1]


def figures_of(benchmark: str, target: Path, *arguments: str) -> list[Figure]:
    """Run ``blockflow.bench.<benchmark>``; what it has written into ``target``."""
    done = subprocess.run(
        [sys.executable, "-m", f"blockflow.bench.{benchmark}", *arguments, "--json", str(target)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "fixed work" in done.stdout
    return [Figure.from_dict(line) for line in ResultFile(target, benchmark).read()]
