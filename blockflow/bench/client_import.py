"""How long a program waits for the client SDK: its import, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

from blockflow.bench.results import Figure, latency_figure
from blockflow.launch.environment import child_environment

CLIENT_IMPORT = "client import"

_CODE = """
import time
begin = time.perf_counter()
from blockflow.client import Client
print(1e3 * (time.perf_counter() - begin))
"""


def import_figure(count: int) -> Figure:
    """Milliseconds of ``from blockflow.client import Client``, ``count`` times.

    Raises:
        subprocess.CalledProcessError: it cannot be imported.
    """
    command, environment = [sys.executable, "-P", "-c", _CODE], child_environment()

    def once() -> float:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return float(done.stdout)

    once()  # files are read, and compiled, for the first time
    return latency_figure(CLIENT_IMPORT, "client", None, [once() for _ in range(count)])
