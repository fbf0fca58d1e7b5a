"""What libraries log in a forked process comes to its own log, which waits for no disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockflow.launch.local import TemplateLauncher

WAIT_S = 60.0
LIBRARY = "import logging; logging.getLogger(__name__).addHandler(logging.StreamHandler())"
CHILD = """
import io
import logging
import sys
from pathlib import Path

def logs(spec):
    sys.stderr = io.StringIO()
    for name in ("early", "late"):
        logging.getLogger(name).warning("of %s", name)
    Path(spec["report"]).write_text(sys.stderr.getvalue())
    return 0
"""
"""With a standard error of its own, as a worker has one: a Scribe."""


def test_libraries_log_where_the_forked_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not to the standard error that they were imported with, as each logger of torch would."""
    for name in ("early", "late"):
        (tmp_path / f"{name}.py").write_text(LIBRARY)
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = TemplateLauncher(preload=["early"])
    try:
        spec = {"report": str(tmp_path / "report"), "modules": ["late"]}
        assert launcher.launch("child:logs", spec, "w#0").wait(WAIT_S) == 0
    finally:
        launcher.close()
    assert (tmp_path / "report").read_text() == "of early\nof late\n"
