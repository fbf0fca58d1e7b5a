"""The fork of apart_rig.py. It imports no more than it runs."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Mapping
from typing import Any


def run(spec: Mapping[str, Any]) -> int:
    """In the fork: what ``python -m`` does with such a module."""
    with socket.socket(socket.AF_UNIX) as parent:
        parent.connect(f"\0{spec['address']}")
        _, (handed,), _, _ = socket.recv_fds(parent, 1, 1)
    if spec["number"]:
        arguments = [str(handed) if a == spec["number"] else a for a in spec["arguments"]]
    else:
        arguments = spec["arguments"]
        os.dup2(handed, 1)
        os.close(handed)
    os.environ.clear()
    os.environ.update(spec["environment"])
    status: int = importlib.import_module(spec["module"]).main(arguments)
    return status
