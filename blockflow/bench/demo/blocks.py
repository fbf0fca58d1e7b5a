"""The demo's blocks: the trunk and the heads, and the three separate models to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockflow.bench.demo.data import TASKS
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.folder import written
from blockflow.repository.repository import BlockRepository
from blockflow.repository.zoo.catalog import ZOO

if TYPE_CHECKING:
    from blockflow.repository.zoo.digits import MultiDigits

INPUT = TensorSpec("float32", ("rows", 1, 8, 8))
SHARED: Mapping[str, str] = ZOO["digits-multi"].blocks
"""Block name -> submodule of the modular deployment."""


def full_name(task: str) -> str:
    """The block that holds a task's whole model: trunk and head."""
    return f"full_{task}"


FULL = tuple(full_name(task) for task in TASKS)


def export_blocks(
    model: MultiDigits, repository: BlockRepository, *, seed: int, progress: Callable[[float], None]
) -> None:
    """Store the shared blocks and the three separate models, which have the very same weights.

    Each export checks that its blocks compute what the model computes.
    """
    # here: they import torch, and whoever reuses blocks can do without
    from blockflow.repository.export import export_model, export_tree
    from blockflow.repository.sources import LoadedModel

    parts = 1 + len(TASKS)

    def part(done: int) -> Callable[[str, float], None]:
        return lambda _what, fraction: progress((done + fraction) / parts)

    shared = LoadedModel(model, "demo:digits-multi", INPUT, seed)
    export_tree(shared, repository, blocks=SHARED, progress=part(0))
    for done, task in enumerate(TASKS, 1):
        whole = LoadedModel(model.separate(task), f"demo:digits-{task}", INPUT, seed)
        export_model(whole, repository, prefix=full_name(task), progress=part(done))
    progress(1.0)


def are_stored(repository: BlockRepository) -> bool:
    """Whether an earlier run left all blocks, whole and unaltered."""
    try:
        for name in (*SHARED, *FULL):
            repository.verify(name)
    except BlockFlowError:
        return False
    return True


def separate_topology() -> dict[str, Any]:
    """The same tasks, each with a model of its own."""
    return {"blocks": list(FULL), "tasks": {task: [full_name(task)] for task in TASKS}}


def one_worker_topology(topology: Mapping[str, Any], worker: str) -> dict[str, Any]:
    """The given blocks and tasks with all blocks hosted by one process.

    With one thread, as each of several workers has: alone it would be planned all cores.
    """
    blocks = [{"name": b} if isinstance(b, str) else dict(b) for b in topology["blocks"]]
    return {**topology, "blocks": [{**b, "worker": worker, "threads": 1} for b in blocks]}


def state_bytes(repository: BlockRepository, names: tuple[str, ...]) -> int:
    """Bytes of parameters and buffers of these blocks together."""
    return sum(repository.info(name).state_bytes for name in names)


def open_repository(root: Path) -> BlockRepository:
    """The block repository at ``root``, made if it is not there.

    Raises:
        RepositoryError: REPOSITORY_UNUSABLE: it cannot be made.
    """
    with written(root):
        root.mkdir(parents=True, exist_ok=True)
    return BlockRepository(root)
