"""What a benchmark starts a system of its own with: all in one folder, on ports that are free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockflow.control.settings import ControlSettings


def own_settings(folder: Path, **more: Any) -> ControlSettings:
    """Blocks in ``blocks`` and the state in ``state`` below ``folder``; ``more`` as there."""
    places = {"repository": folder / "blocks", "state_dir": folder / "state", **more}
    return ControlSettings(rest_port=0, client_port=0, **places)
