"""What forked children draw at random: no two the same, and nothing is imported for it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from blockflow.launch.local import TemplateLauncher

WAIT_S = 20.0


def draws(spec: Mapping[str, Any]) -> int:
    """A child that draws, and says which of numpy's modules it had before."""
    found = sorted(name for name in sys.modules if name.startswith("numpy.random"))
    import numpy

    facts = {"modules": found, "drawn": [random.random(), float(numpy.random.random())]}
    Path(spec["report"]).write_text(json.dumps(facts))
    return 0


@pytest.mark.parametrize("preload", ["numpy", "numpy.random"])
def test_children_draw_by_themselves(tmp_path: Path, preload: str) -> None:
    """Modules that each child imports by itself cost it time and private memory."""
    launcher = TemplateLauncher(preload=[preload, __name__])
    reports = []
    try:
        for n in range(3):
            report = tmp_path / str(n)
            child = launcher.launch(f"{__name__}:draws", {"report": str(report)}, f"w#{n}")
            assert child.wait(WAIT_S) == 0
            child.close()
            reports.append(json.loads(report.read_text()))
    finally:
        launcher.close()
    for n, way in enumerate(("random", "numpy.random")):
        assert len({r["drawn"][n] for r in reports}) == 3, way
    for r in reports:
        assert bool(r["modules"]) == (preload == "numpy.random"), r["modules"]
