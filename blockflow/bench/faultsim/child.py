"""``python -m blockflow.bench.faultsim.child``: runs seeds for another process.

The first line of the standard input says how long a run is and which faults come, every further one
is a seed, all JSON; what each has found is one line of the standard output.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from typing import TextIO

from blockflow.bench.faultsim.outcome import run_seed


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer until there are no more lines."""
    head = json.loads(lines.readline())
    for line in lines:
        found = run_seed(json.loads(line), head["hours"], head["kinds"])
        answers.write(json.dumps(asdict(found)) + "\n")
        answers.flush()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    serve(sys.stdin, sys.stdout)
