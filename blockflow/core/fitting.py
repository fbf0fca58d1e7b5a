"""Fitting: what blocks and tasks ask for that the machine, or the rest of a topology, cannot give.
Pure.

Each check looks at one block or task, so that all findings of an update are told at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blockflow.core import limits
from blockflow.core.errors import Problem
from blockflow.core.model import ROWS, BlockInfo
from blockflow.core.specs import BlockSpec, TaskSpec

MIB = 1024 * 1024

LEAST_SLOTS = 2
"""With one for what goes back on opposed paths, one is left for what goes forward."""
LEAST_OUTPUTS = limits.ARENA_GAPS * LEAST_SLOTS - 1
"""Largest outputs for which an arena has room at least."""


def core_problems(spec: BlockSpec, cores: Sequence[int], path: str) -> list[Problem]:
    """What is wrong with a block's cores and threads where the system may use ``cores``."""
    problems: list[Problem] = []
    missing = set(spec.cores or ()) - set(cores)
    if missing:
        problems.append(
            Problem(
                f"{path}.cores",
                f"cores {sorted(missing)} are not available",
                f"this system may use cores {sorted(cores)}",
            )
        )
    most = len(set(spec.cores or cores))
    if spec.asked_threads is not None and spec.asked_threads > most:
        problems.append(
            Problem(
                f"{path}.threads",
                f"{spec.threads} threads on {most} core{'s' * (most > 1)} would fight for them",
                "give at most one thread per core",
            )
        )
    return problems


def most_rows(info: BlockInfo) -> int:
    """Rows of the largest batch that the block computes."""
    return info.contract.input.ranges.get(ROWS, (1, limits.MAX_ROWS))[1]


def laid_out(spec: BlockSpec, info: BlockInfo | None, max_rows: int) -> int:
    """Rows of the largest batch that the block's worker is laid out for.

    Args:
        max_rows: the topology's.
    """
    wished = spec.max_rows or max_rows
    return wished if info is None else min(wished, most_rows(info))


def bound_problems(spec: BlockSpec, info: BlockInfo, path: str) -> list[Problem]:
    """Whether the block takes as many rows at once as are asked of it alone."""
    most = most_rows(info)
    if spec.max_rows is None or spec.max_rows <= most:
        return []
    return [
        Problem(
            f"{path}.max_rows",
            f"{spec.max_rows} rows, but the block was exported for {most} at most",
            f"give {most} or fewer, or leave max_rows out",
        )
    ]


def arena_problems(spec: BlockSpec, info: BlockInfo, max_rows: int, path: str) -> list[Problem]:
    """Whether an arena of ``arena_mib`` holds three outputs of ``max_rows`` rows, as far as the
    contract bounds them: one that the next worker reads, one that is being made, and the gap that
    may lie between them. With less, workers on opposed paths could wait for each other."""
    output = info.contract.output
    if spec.arena_mib is None or not output.bounded:
        return []
    needed = LEAST_OUTPUTS * output.row_bytes() * max_rows
    if needed <= spec.arena_mib * MIB:
        return []
    return [
        Problem(
            f"{path}.arena_mib",
            f"{spec.arena_mib} MiB cannot hold three outputs of {max_rows} rows ({needed} bytes)",
            f"give {-(-needed // MIB)} at least, fewer max_rows, or leave arena_mib out",
        )
    ]


def size_problems(info: BlockInfo, path: str) -> list[Problem]:
    """Whether one row, as small as the contract lets it be, is a tensor that any message may bring:
    a block with larger ones could be launched at most, if the machine has numbers for their size.
    """
    found = []
    for side, contract in (("input", info.contract.input), ("output", info.contract.output)):
        nbytes = contract.least_row_bytes()
        if nbytes > limits.MAX_MESSAGE_BYTES:
            found.append(
                Problem(
                    path,
                    f"one row of the {side} in its contract is {nbytes} bytes, over the limit of "
                    f"{limits.MAX_MESSAGE_BYTES} for a tensor",
                    f"the {side} of its manifest's contract has to have smaller dims",
                )
            )
    return found


def row_problems(task: TaskSpec, rows: Mapping[str, int], path: str) -> list[Problem]:
    """Whether every block on a task's paths takes requests of as many rows as the task promises.

    Args:
        rows: block -> rows that its worker is laid out for; blocks that are missing count as wide.
        path: JSON path of the task.
    """
    if task.max_rows is None:
        return []
    narrow = {b: rows[b] for way in task.paths for b in way if rows.get(b, 1 << 62) < task.max_rows}
    if not narrow:
        return []
    block = min(narrow, key=narrow.__getitem__)
    return [
        Problem(
            f"{path}.max_rows",
            f"{task.max_rows} rows, but block {block!r} takes {narrow[block]}",
            f"give the block max_rows of {task.max_rows}, or raise $.limits.max_rows, which is the "
            "default of all; what a block was exported for no update raises",
        )
    ]
