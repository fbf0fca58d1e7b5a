"""What this machine's worker processes take with the blocks of a model: private memory (USS).

A worker is alone with its blocks while it is measured, so no page of an artifact is shared with
another one, as it would not be between tasks with weights of their own. Pages that come from the
template (libraries) are shared and not counted: one more worker does not cost them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from blockflow.bench.contenders import Model
from blockflow.bench.in_process import Chain, example
from blockflow.bench.sampler import memory_of
from blockflow.bench.statistics import percentile
from blockflow.bench.thesis.memory_model import NOTHING, PROCESSES, Blocks, Occupancy
from blockflow.bench.turns import in_turn
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.errors import make_error
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

EMPTY = "empty"
"""The block that holds nothing."""

ROUNDS = 15
"""Starts of every kind of process, a round of all kinds at a time, that conclude from MiB."""

_TASK = "measured"
_REQUESTS = 3
_GONE_S = 60.0
_MIB = 2**20

KINDS: tuple[Blocks, ...] = (NOTHING, *PROCESSES)
"""The processes that a round starts."""


def save_empty(repository: Path) -> None:
    """Store the block :data:`EMPTY`, which holds nothing: its process takes the context C."""
    save_echo(BlockRepository(repository), EMPTY, TensorSpec("float32", ("rows", 1)))


def measure(
    chain: Chain,
    rounds: int,
    state_dir: Path,
    advance: Callable[[], None],
    broken: Callable[[dict[Blocks, list[float]]], None] = lambda _found: None,
) -> dict[Blocks, list[float]]:
    """MiB of every kind of process, once per round, in turns.

    Args:
        chain: of four blocks.
        rounds: how often each is started anew.
        state_dir: of the system; a new folder.
        advance: called after every process.
        broken: gets the whole rounds so far, if there are any, when one fails.

    Raises:
        BlockFlowError: the blocks cannot be served here.
    """
    repository = BlockRepository(chain.repository)
    save_empty(chain.repository)
    with (
        System(
            repository=chain.repository, state_dir=state_dir, rest_port=0, client_port=0
        ) as system,
        Client(system.client_endpoint) as client,
    ):

        def start(blocks: Blocks) -> float:
            names = [chain.blocks[b - 1] for b in blocks] or [EMPTY]
            found = _one(system, client, repository, chain, names)
            advance()
            return found

        starts = {blocks: partial(start, blocks) for blocks in KINDS}
        return in_turn(starts, rounds, lambda: None, broken=broken)


def _one(
    system: System,
    client: Client,
    repository: BlockRepository,
    chain: Chain,
    names: Sequence[str],
) -> float:
    """Private MiB of a worker with these blocks that has answered some requests."""
    system.apply(topology(chain, names))
    x = example(repository.info(names[0]).contract.input, 1)
    for _ in range(_REQUESTS):
        client.infer(_TASK, x)
    worker = next(w for w in system.status()["workers"] if w["worker"] == _TASK)
    process = psutil.Process(worker["pid"])
    found = private_mib(process.pid)
    system.apply({"blocks": [], "tasks": {}})
    # Two that map the same artifact at the same time would share its pages.
    try:
        process.wait(_GONE_S)
    except psutil.TimeoutExpired:
        raise make_error("TIMEOUT", "a worker did not end", where=f"pid {process.pid}") from None
    return found


def private_mib(pid: int) -> float:
    """A process's private memory (USS); errors as :func:`memory_of`."""
    name = "a process"
    return memory_of({name: pid})[name].uss / _MIB


def topology(chain: Chain, names: Sequence[str]) -> dict[str, Any]:
    """One worker with these blocks, and a task that runs through them."""
    own = {"engine": chain.engine, "precision": chain.precision}
    blocks = [
        {"name": n, "worker": _TASK, "threads": chain.threads, **({} if n == EMPTY else own)}
        for n in names
    ]
    return {"blocks": blocks, "tasks": {_TASK: {"path": list(names), "deadline_ms": 60_000}}}


def occupancy(model: Model, found: Mapping[Blocks, Sequence[float]]) -> Occupancy:
    """The medians."""
    middle = {blocks: percentile(samples, 50) for blocks, samples in found.items()}
    context = middle.pop(NOTHING)
    return Occupancy(model.name, "MiB", middle, context)


def by_rounds(model: Model, found: Mapping[Blocks, Sequence[float]]) -> list[Occupancy]:
    """Each round by itself: its starts of every kind of process."""
    return [
        occupancy(model, dict(zip(found, ([mib] for mib in starts), strict=True)))
        for starts in zip(*found.values(), strict=True)
    ]
