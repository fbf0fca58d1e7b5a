"""A process with one thing to do: make a scratch folder and wait there until it is ended."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from blockflow.bench.other_process import answer_apart


def _wait_for_ever() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        Path(folder, "inside").touch()  # a folder whose making is interrupted is nobody's
        threading.Event().wait()


if __name__ == "__main__":
    raise SystemExit(answer_apart(_wait_for_ever))
