"""``python -m blockflow.bench.simulation.child``: runs cells of an experiment for another process.

The first line of the standard input is the experiment, every further one a cell, all JSON; each
cell's outcome, or what went wrong with it, is one line of the standard output.
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

from blockflow.bench.simulation.experiment import Cell, Experiment, Runner
from blockflow.bench.simulation.watch import InvariantBroken
from blockflow.core.errors import BlockFlowError


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer until there are no more lines."""
    runner = Runner(Experiment.from_dict(json.loads(lines.readline())))
    for line in lines:
        answers.write(json.dumps(_answer(runner, Cell(*json.loads(line)))) + "\n")
        answers.flush()


def _answer(runner: Runner, cell: Cell) -> dict[str, Any]:
    try:
        return {"outcome": runner.run(cell).to_dict()}
    except BlockFlowError as exc:
        return {"error": exc.to_dict()}
    except InvariantBroken as exc:
        return {"broken": [exc.rule, exc.now, exc.what, *exc.__notes__]}


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
