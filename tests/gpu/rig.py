"""What the GPU tests ask of the machine."""

from __future__ import annotations

import os

from blockflow.tensormq.cuda_here import DOUBLE_ENV
from blockflow.tensormq.memory import open_device

REAL = not os.environ.get(DOUBLE_ENV)
"""False when the double stands in for the driver."""


def devices() -> list[str]:
    """All that are here, by trying."""
    found = []
    for number in range(8):
        try:
            open_device(f"cuda:{number}").close()
        except Exception:  # no such device ends the list
            break
        found.append(f"cuda:{number}")
    return found
