"""Paths: what a task's path of blocks gives, and what is wrong with one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from blockflow.core.dims import Dim, names_in, substituted
from blockflow.core.errors import Problem
from blockflow.core.guess import Guesses
from blockflow.core.jsonpath import member
from blockflow.core.model import ROWS, BlockInfo, Contract, TensorSpec
from blockflow.core.specs import TaskSpec

_TRIED = 16
"""Sizes at each end of a dim's range that two paths are compared by."""


def path_contract(path: Sequence[str], infos: Mapping[str, BlockInfo]) -> Contract:
    """Input of a path's first block and its last block's output, in the input's dim names.

    Each block names its dynamic dims for itself; they are followed from pair to pair.
    """
    start = infos[path[0]].contract.input
    dims = start.dims
    for block in path:
        dims = dims_after(infos[block].contract, dims)
    last = infos[path[-1]].contract.output
    names = {name for dim in dims for name in names_in(dim)}
    kept = {n: r for n, r in start.ranges.items() if n in names}
    return Contract(start, TensorSpec(last.dtype, dims, kept))


def dims_after(contract: Contract, dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """What a block makes of these dims, in their names."""
    bound = {n: d for n, d in zip(contract.input.dims, dims, strict=True) if isinstance(n, str)}
    return tuple(substituted(d, bound) for d in contract.output.dims)


def path_problems(
    tasks: Mapping[str, TaskSpec],
    short: Collection[str],
    declared: Mapping[Any, int],
    infos: Mapping[str, BlockInfo],
) -> list[Problem]:
    """Everything that is wrong with the tasks' paths and those of their canaries.

    Args:
        tasks: those whose own form is right.
        short: which of them were given as a bare path: it decides on the JSON paths.
        declared: the blocks that the topology lists, even if something is wrong with them.
        infos: the blocks that could be looked up.
    """
    problems: list[Problem] = []
    guesses = Guesses(b for b in declared if isinstance(b, str))

    def check(path: Sequence[str], base: str) -> bool:
        before = len(problems)
        for i, block in enumerate(path):
            if block in path[:i]:
                problems.append(
                    Problem(f"{base}[{i}]", f"block {block!r} stands twice in the path")
                )
            if block not in declared:
                problems.append(
                    Problem(
                        f"{base}[{i}]",
                        f"unknown block {block!r}",
                        guesses.hint(block) or "list it in $.blocks",
                    )
                )
        for i in range(1, len(path)):
            a, b = path[i - 1], path[i]
            if a in infos and b in infos:
                give, take = infos[a].contract.output, infos[b].contract.input
                why = take.accepts(give)
                if why:
                    problems.append(
                        Problem(
                            f"{base}[{i}]",
                            f"contracts don't fit: {a} gives {give}, {b} takes {take} ({why})",
                            "connect blocks of one model in their order",
                        )
                    )
        if len(problems) == before and all(b in infos for b in path):
            problems.extend(_unwritten(path, infos, base))
        return len(problems) == before and all(b in infos for b in path)

    for task, spec in tasks.items():
        base = member("$.tasks", task)
        whole = check(spec.path, base if task in short else f"{base}.path")
        if spec.canary is not None:
            path = f"{base}.canary.path"
            if check(spec.canary.path, path) and whole:
                problems += _canary(spec.path, spec.canary.path, infos, path)
    return problems


def _unwritten(path: Sequence[str], infos: Mapping[str, BlockInfo], base: str) -> list[Problem]:
    try:
        path_contract(path, infos)
    except ValueError as e:
        why = f"what the path gives cannot be written as a contract: {e}"
        return [Problem(base, why, "give a dim of one of its blocks a fixed size")]
    return []


def _canary(
    stable: Sequence[str], canary: Sequence[str], infos: Mapping[str, BlockInfo], path: str
) -> list[Problem]:
    """A canary takes all that its task takes, and gives what it gives."""
    if stable == canary:
        return [Problem(path, "the canary takes the task's own path", "name what is to be tried")]
    old, new = path_contract(stable, infos), path_contract(canary, infos)
    taken = new.input.accepts(old.input)
    given = old.output.accepts(new.output) or new.output.accepts(old.output)
    why = f"{new.input} for {old.input} ({taken})" if taken else ""
    why = why or (f"{new.output} for {old.output} ({given})" if given else "")
    why = why or _other_dims(old, new)
    hint = "a canary answers as the task does; publish it as a task of its own"
    return [Problem(path, f"its contract is not the task's: {why}", hint)] if why else []


def _other_dims(old: Contract, new: Contract) -> str:
    """An input of which two contracts that fit each other make different dims ('' if none of those
    tried is one): formulas of one meaning can be written in many ways, so they are worked out."""
    for sample in range(-_TRIED, _TRIED):
        bound = {ROWS: 1}
        for n, name in enumerate(old.input.dynamic):
            lo, hi = old.input.bounds(name)
            # from both ends, and no two dims alike
            bound[name] = min(lo + sample + n, hi) if sample >= 0 else max(hi + 1 + sample - n, lo)
        takes = old.input.resolve(bound)
        renamed = {n: d for n, d in zip(new.input.dims, takes, strict=True) if isinstance(n, str)}
        was, now = old.output.resolve(bound), new.output.resolve(renamed)
        if was != now and min(was) > 0:
            return f"of {list(takes)} it makes {list(now)}, the task {list(was)}"
    return ""
