"""What a benchmark starts a system of its own with: all in one folder, on ports that are free."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from blockflow.control.settings import ControlSettings


def own_settings(folder: Path, **more: Any) -> ControlSettings:
    """Blocks in ``blocks`` and the state in ``state`` below ``folder``; ``more`` as there."""
    places = {"repository": folder / "blocks", "state_dir": folder / "state", **more}
    return ControlSettings(rest_port=0, client_port=0, **places)


@contextmanager
def workplace(console: Console) -> Iterator[tuple[Path, Progress]]:
    """A folder that goes when the benchmark ends, and the bars of what is done."""
    with (
        tempfile.TemporaryDirectory(prefix="bf-bench-") as folder,
        Progress(console=console) as bar,
    ):
        yield Path(folder), bar
