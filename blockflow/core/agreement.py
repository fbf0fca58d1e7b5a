"""Agreement: what blocks that share a worker must have in common. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockflow.core.errors import Problem
from blockflow.core.specs import BlockSpec


def group_problems(
    blocks: Mapping[str, BlockSpec], index: Mapping[Any, int], mode: str
) -> list[Problem]:
    """Where the blocks of one worker differ in what a process has once.

    Args:
        blocks: by name.
        index: where each stands in the update, for the JSON paths.
        mode: of those that name none.
    """
    problems: list[Problem] = []
    groups: dict[str, list[BlockSpec]] = {}
    for spec in blocks.values():
        groups.setdefault(spec.worker or spec.name, []).append(spec)
    for worker, members in groups.items():
        first = members[0]
        problems += _lane_problems(first, len(members), f"$.blocks[{index[first.name]}].lanes")
        for spec in members[1:]:
            for key in ("device", "replicas", "threads", "lanes", "cores", "mode"):
                if _meant(spec, key, mode) != _meant(first, key, mode):
                    problems.append(
                        Problem(
                            f"$.blocks[{index[spec.name]}].{key}",
                            f"blocks of worker {worker!r} must agree: {first.name} "
                            f"{_said(first, key)}, {spec.name} {_said(spec, key)}",
                            f"give each of them the same {key}",
                        )
                    )
    return problems


def _meant(spec: BlockSpec, key: str, mode: str) -> Any:
    """What a field says, however it is written."""
    match key:
        case "mode":
            return spec.mode or mode
        case "cores":
            return None if spec.cores is None else set(spec.cores)
    return getattr(spec, key)


def _said(spec: BlockSpec, key: str) -> str:
    value = getattr(spec, key)
    if value is None:
        return f"says no {key}"
    return f"has {list(value) if key == 'cores' else value}"


def _lane_problems(spec: BlockSpec, blocks: int, path: str) -> list[Problem]:
    """What is wrong with the lanes of a worker with so many blocks."""
    lanes = spec.asked_lanes or 1
    if lanes > 1 and spec.device != "cpu":
        return [
            Problem(
                path, f"{lanes} lanes on {spec.device}", "on a GPU a worker has one: leave it out"
            )
        ]
    if lanes > blocks:
        return [
            Problem(
                path,
                f"{lanes} lanes for {blocks} block{'s' if blocks > 1 else ''}",
                "at most one lane per block of the worker; replicas run one block several times",
            )
        ]
    return []
