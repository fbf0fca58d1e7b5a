"""Topology: what a system update asks for; parsed, checked, complete with all findings at once.

Both forms are taken: the thesis's body (listing 4.1) as it stands, and objects with options in the
place of a block name or a task's path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from blockflow.core import limits
from blockflow.core.agreement import group_problems
from blockflow.core.artifacts import Lookup, Pinned, by_name, found_artifacts
from blockflow.core.entries import from_pydantic, told, uncarried, usable, wrong_fields
from blockflow.core.errors import Problem, TopologyError
from blockflow.core.fitting import (
    arena_problems,
    bound_problems,
    core_problems,
    laid_out,
    row_problems,
    size_problems,
)
from blockflow.core.guess import Guesses
from blockflow.core.jsonpath import member
from blockflow.core.model import BlockInfo, Contract
from blockflow.core.paths import path_contract, path_problems
from blockflow.core.specs import BlockSpec, LimitSpec, Mode, Name, TaskSpec, Transport
from blockflow.core.text import json_kind

_NAME: TypeAdapter[str] = TypeAdapter(Name)
_BASIS = frozenset({"blocks", "tasks", "limits"})
"""What all else is judged by."""
_ENTRY = re.compile(
    r"\$\.(blocks\[\d+\]|tasks(\.[A-Za-z_][A-Za-z0-9_]*|\['([^'\\]|\\.)*'\]))", re.DOTALL
)
"""A block or a task at the beginning of a JSON path."""


class _Frame(BaseModel):
    """The outermost object; blocks and tasks are checked one by one, so that one wrong entry does
    not hide the findings in the others."""

    model_config = ConfigDict(extra="forbid", strict=True)
    blocks: list[Any]
    tasks: dict[str, Any]
    mode: Mode = "tensormq"
    transport: Transport = "ipc"
    limits: LimitSpec = LimitSpec()
    oversubscribe: bool = False


@dataclass(frozen=True)
class Topology:
    """A valid desired state: everything in it fits together.

    ``infos`` holds the repository's facts per block name of this topology. ``oversubscribe`` allows
    explicit threads beyond the cores (for those who send one request at a time). ``costs`` are
    measured: ms of one row on one thread per block, where known; ``overlap`` tells per block how
    many batches its policy can have under way at once. Both steer the plan of threads and lanes and
    are no part of what was asked for. ``notes`` tell people what was decided for them.
    """

    blocks: Mapping[str, BlockSpec]
    tasks: Mapping[str, TaskSpec]
    infos: Mapping[str, BlockInfo]
    mode: Mode = "tensormq"
    transport: Transport = "ipc"
    max_rows: int = limits.DEFAULT_MAX_ROWS
    oversubscribe: bool = False
    costs: Mapping[str, float] = field(default_factory=dict)
    overlap: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    memo: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def mode_of(self, block: str) -> Mode:
        return self.blocks[block].mode or self.mode

    def rows_of(self, block: str) -> int:
        """Largest batch in rows that the block's worker is laid out for."""
        return laid_out(self.blocks[block], self.infos.get(block), self.max_rows)

    def task_rows(self, task: str) -> int:
        """Largest request in rows: the task's own limit, at most that of each block on its path
        (and on its canary's)."""
        spec = self.tasks[task]
        blocks = (b for path in spec.paths for b in path)
        return min(spec.max_rows or self.max_rows, *(self.rows_of(b) for b in blocks))

    def contract_of(self, task: str) -> Contract:
        """What the task takes and gives: :func:`path_contract` of its path."""
        return path_contract(self.tasks[task].path, self.infos)

    def digests(self) -> dict[str, str]:
        """Which artifact each stored block was when this was checked: block of the repository (as
        :attr:`BlockSpec.artifact` names it) -> sha256."""
        return {s.artifact: self.infos[n].digest for n, s in self.blocks.items()}

    def to_dict(self) -> dict[str, Any]:
        """What was asked for, with all defaults spelled out. Which artifacts were meant is not in
        it: whoever stores it keeps :meth:`digests` beside it."""
        return {
            "blocks": [
                b.model_dump(mode="json", exclude_none=True, exclude={"digest"})
                for b in self.blocks.values()
            ],
            "tasks": {
                n: t.model_dump(mode="json", exclude_none=True) for n, t in self.tasks.items()
            },
            "mode": self.mode,
            "transport": self.transport,
            "limits": {"max_rows": self.max_rows},
            "oversubscribe": self.oversubscribe,
        }

    def extended(self) -> dict[str, Any]:
        """:meth:`to_dict` with the digest of each block's artifact: posted again it means these
        very artifacts, also when a rollback has brought them back under names that mean others."""
        out = self.to_dict()
        for block in out["blocks"]:
            block["digest"] = self.infos[block["name"]].digest
        return out


@dataclass(frozen=True)
class Draft:
    """A system update that has been looked at.

    Attributes:
        topology: what of it can be judged further: blocks with which, and with whose neighbours in
            their worker, nothing is wrong, and tasks over these. All of it where there are no
            problems.
        problems: what was found.
        index: block -> where it stands in the update.
        whole: every block and every task of the update is in ``topology``, with the limits that
            were meant.
    """

    topology: Topology
    problems: tuple[Problem, ...]
    index: Mapping[Any, int]
    whole: bool


PolicyCheck = Callable[[Mapping[str, Any], str], Sequence[Problem]]
EngineCheck = Callable[[BlockSpec, BlockInfo, str], Sequence[Problem]]


def _any_policy(spec: Mapping[str, Any], path: str) -> Sequence[Problem]:
    """Policies are checked by those who run them."""
    return ()


def _any_engine(spec: BlockSpec, info: BlockInfo, path: str) -> Sequence[Problem]:
    """Engines are checked where they run."""
    return ()


def parse_topology(
    data: Any,
    lookup: Lookup,
    check_policy: PolicyCheck = _any_policy,
    check_engine: EngineCheck = _any_engine,
    cores: Sequence[int] | None = None,
    pinned: Pinned | None = None,
) -> Topology:
    """Check a system update as a whole; the arguments are those of :func:`draft_topology`.

    Raises:
        TopologyError: INVALID_TOPOLOGY with every problem and its JSON path.
    """
    draft = draft_topology(data, lookup, check_policy, check_engine, cores, pinned)
    if draft.problems:
        raise invalid_update(draft.problems)
    return draft.topology


def draft_topology(
    data: Any,
    lookup: Lookup,
    check_policy: PolicyCheck = _any_policy,
    check_engine: EngineCheck = _any_engine,
    cores: Sequence[int] | None = None,
    pinned: Pinned | None = None,
) -> Draft:
    """Look at a system update; whoever has more to judge does so with what is sound.

    Args:
        data: the decoded JSON body.
        lookup: gives a stored block's facts or raises a BlockFlowError (unknown block, bad
            manifest).
        check_policy: finds what is wrong with a ``batching`` object, given its JSON path.
        check_engine: finds what is wrong with a block's engine, precision, options and device,
            given the block's facts and the block's JSON path.
        cores: that the system may use. None for what was accepted before: whether it still fits
            is not asked.
        pinned: as ``lookup``, for blocks whose digest is given; None: only what ``lookup`` gives.
    """
    problems: list[Problem] = []
    if not isinstance(data, dict):
        wrong = Problem("$", f"expected a JSON object, got {json_kind(data)}")
        return Draft(Topology({}, {}, {}), (wrong,), {}, False)
    frame, unsound = _frame(data, problems)
    blocks = _blocks(frame.blocks, problems)
    tasks = _tasks(frame.tasks, problems)
    index = _positions(frame.blocks)
    for name, spec in blocks.items():
        path = f"$.blocks[{index[name]}].batching"
        problems += check_policy(spec.batching.model_dump(mode="json"), path)
        if cores is not None:
            problems += core_problems(spec, cores, f"$.blocks[{index[name]}]")
    infos = found_artifacts(blocks, index, lookup, pinned or by_name(lookup), problems)
    for name, info in infos.items():
        problems += check_engine(blocks[name], info, f"$.blocks[{index[name]}]")
    room: list[Problem] = []
    if cores is not None and "limits" not in unsound:  # else they are not those that were meant
        room = _room_problems(blocks, tasks, index, infos, frame.limits.max_rows)
    short = {t for t, entry in frame.tasks.items() if isinstance(entry, list)}
    ways = path_problems(tasks, short, index, infos)
    shared = group_problems(blocks, index, frame.mode)
    wrong_at = {_entry_of(p.path) for p in (*problems, *ways, *shared)}
    lone = {n: s for n, s in blocks.items() if f"$.blocks[{index[n]}]" not in wrong_at}
    apart = {s.worker or n for n, s in blocks.items() if n not in lone}
    sound = {n: s for n, s in lone.items() if (s.worker or n) not in apart}
    over = {
        n: t
        for n, t in tasks.items()
        if member("$.tasks", n) not in wrong_at and all(sound.keys() >= set(w) for w in t.paths)
    }
    topology = Topology(
        sound,
        over,
        {n: infos[n] for n in sound},
        frame.mode,
        frame.transport,
        frame.limits.max_rows,
        frame.oversubscribe or "oversubscribe" in unsound,
    )
    whole = not unsound & _BASIS and (len(sound), len(over)) == (
        len(frame.blocks),
        len(frame.tasks),
    )
    return Draft(topology, (*problems, *room, *ways, *shared), index, whole)


def invalid_update(problems: Sequence[Problem]) -> TopologyError:
    """INVALID_TOPOLOGY with all that was found."""
    n = len(problems)
    return TopologyError(
        "INVALID_TOPOLOGY",
        f"{n} problem{'s' if n > 1 else ''} in the system update",
        problems=problems,
        hint="nothing was changed; mend all of them and send the update again",
    )


def _entry_of(path: str) -> str:
    """JSON path of the block or task that a finding is in; other paths stay as they are."""
    found = _ENTRY.match(path)
    return found[0] if found else path


def _frame(data: dict[str, Any], problems: list[Problem]) -> tuple[_Frame, set[str]]:
    """The frame without what is wrong with it, and the names of its fields that were wrong: the
    findings inside blocks and tasks are reported as well."""
    try:
        return _Frame.model_validate(data), set()
    except ValidationError as exc:
        problems += from_pydantic(exc, "$", _Frame, {})
        unsound = wrong_fields(exc)
    left = {k: v for k, v in data.items() if k not in unsound}
    return _Frame.model_validate({"blocks": [], "tasks": {}, **left}), unsound


def _blocks(raw: list[Any], problems: list[Problem]) -> dict[str, BlockSpec]:
    out: dict[str, BlockSpec] = {}
    guesses: dict[type[BaseModel], Guesses] = {}
    if len(raw) > limits.MAX_BLOCKS:
        problems.append(
            Problem("$.blocks", f"{len(raw)} blocks are over the limit of {limits.MAX_BLOCKS}")
        )
        return out
    for i, entry in enumerate(raw):
        path = f"$.blocks[{i}]"
        if not isinstance(entry, str | dict):
            problems.append(
                Problem(path, f"a block is a name or an object, not {json_kind(entry)}")
            )
            continue
        fields = {"name": entry} if isinstance(entry, str) else entry
        lost = uncarried(fields, path)
        problems += told(lost.values(), path)
        spec: BlockSpec | None
        try:
            spec = BlockSpec.model_validate({k: fields[k] for k in fields if k not in lost})
        except ValidationError as exc:
            known = {p.path for p in lost.values()}  # they are not missing
            found = [p for p in from_pydantic(exc, path, BlockSpec, guesses) if p.path not in known]
            if isinstance(entry, str):
                found = [Problem(path, p.message, p.hint) for p in found]
            problems += found
            spec = usable(BlockSpec, fields, wrong_fields(exc) | lost.keys())
        if spec is None:
            continue
        if spec.name in out:
            problems.append(
                Problem(path, f"block {spec.name!r} stands twice", "name each block once")
            )
            continue
        out[spec.name] = spec
    return out


def _tasks(raw: dict[str, Any], problems: list[Problem]) -> dict[str, TaskSpec]:
    out: dict[str, TaskSpec] = {}
    guesses: dict[type[BaseModel], Guesses] = {}
    if len(raw) > limits.MAX_TASKS:
        problems.append(
            Problem("$.tasks", f"{len(raw)} tasks are over the limit of {limits.MAX_TASKS}")
        )
        return out
    for name, entry in raw.items():
        path = member("$.tasks", name)
        try:
            _NAME.validate_python(name)
        except ValidationError:
            hint = "a letter, then up to 63 letters, digits, '_', '.' and '-'"
            problems.append(Problem(path, f"{name!r} is not a valid task id", hint))
        if not isinstance(entry, list | dict):
            problems.append(Problem(path, f"a task is a path or an object, not {json_kind(entry)}"))
            continue
        fields = {"path": entry} if isinstance(entry, list) else entry
        try:
            out[name] = TaskSpec.model_validate(fields)
        except ValidationError as exc:
            found = from_pydantic(exc, path, TaskSpec, guesses)
            if isinstance(entry, list):
                found = [
                    Problem(
                        path + p.path.removeprefix(path).removeprefix(".path"), p.message, p.hint
                    )
                    for p in found
                ]
            problems += found
            left = usable(TaskSpec, fields, wrong_fields(exc))
            if left is not None:
                out[name] = left
    return out


def _positions(raw: list[Any]) -> dict[Any, int]:
    """Where each block stands first, by the name it claims."""
    return {
        (e if isinstance(e, str) else e.get("name")): i
        for i, e in reversed(list(enumerate(raw)))
        if isinstance(e, str) or (isinstance(e, dict) and isinstance(e.get("name"), str))
    }


def _room_problems(
    blocks: Mapping[str, BlockSpec],
    tasks: Mapping[str, TaskSpec],
    index: Mapping[Any, int],
    infos: Mapping[str, BlockInfo],
    max_rows: int,
) -> list[Problem]:
    rows = {name: laid_out(spec, infos.get(name), max_rows) for name, spec in blocks.items()}
    found: list[Problem] = []
    for name, info in infos.items():
        path = f"$.blocks[{index[name]}]"
        found += bound_problems(blocks[name], info, path)
        found += size_problems(info, path) or arena_problems(blocks[name], info, rows[name], path)
    for name, task in tasks.items():
        found += row_problems(task, rows, member("$.tasks", name))
    return found
