"""Rehearsal: what a worker does at its start, once in the template, so that a fork need not.

Python writes to the pages of whatever it uses: counts references, specialises code, fills caches. A
page written by a forked worker is a private page. What the template has done before, its workers
find done: measured 16 instead of 19 MB of private memory with a block of ResNet-50.
Nothing is computed here, no thread is started and no socket opened (the template checks).

The template has given up nothing, and nobody has asked for these blocks yet. So they are read as
data or not at all: never by ``torch.export.load``, and nothing that is large.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

from torch import nn

from blockflow.core.engines import TORCH_EXPORT
from blockflow.core.errors import BlockFlowError, RepositoryError
from blockflow.core.launchspec import StageSpec, WorkerLaunch
from blockflow.core.model import BlockInfo
from blockflow.engine.base import EngineOptions
from blockflow.engine.exported import ExportedEngine
from blockflow.engine.program import is_known
from blockflow.engine.targets import UnknownProgram
from blockflow.launch.preload import modules_of, preload
from blockflow.repository.machine import fingerprint
from blockflow.repository.repository import BlockRepository
from blockflow.worker.scheduler import Scheduler

FORMAT = "pt2"
"""The format whose loading runs much Python code (engine ``exported``); others load in C++."""
_MOST_BYTES = 64 << 20
_MOST_JSON = 4 << 20
"""Of a record that is parsed, which may take twenty times as much: lists of nothing. The graph of
twelve layers of a transformer takes 0.7 MiB."""
_TIMES = 2
_LOOK_AT = 64


def rehearse(spec: Mapping[str, Any]) -> None:
    """Load the smallest exported block of ``spec["repository"]``, if it has one, and forget it.

    Where one of its blocks is not read as data (:mod:`blockflow.engine.program`), what loads that
    one is imported: its workers would do so each by itself.

    Raises:
        BlockFlowError: a block cannot be loaded; its workers will say so again.
    """
    fingerprint()  # kept by its cache: finding it runs through every installed package
    repository = BlockRepository(Path(spec["repository"]))
    blocks = [(size, block, _is_data(repository, block)) for size, block in _exported(repository)]
    if any(data is False for _, _, data in blocks):
        preload(modules_of([TORCH_EXPORT]))
    size, block, _ = min(
        (b for b in blocks if b[2]), key=lambda b: b[0], default=(_MOST_BYTES + 1, None, None)
    )
    if block is None or size > _MOST_BYTES:
        return
    for _ in range(_TIMES):
        launch = WorkerLaunch.from_dict(_launch(block).to_dict())
        Scheduler({s.stage: s.policy for s in launch.stages})
        engine = _DataEngine(block, EngineOptions())
        with repository.artifact(block.name, digest=block.digest) as path:
            if path.stat().st_size > _MOST_BYTES:
                return
            engine.load(path)
        engine.close()


class _DataEngine(ExportedEngine):
    """Reads data only, whatever the file has become since it was looked at."""

    def _load_by_torch(self, file: BinaryIO) -> nn.Module:
        raise UnknownProgram("not read as data")


def _exported(repository: BlockRepository) -> list[tuple[int, BlockInfo]]:
    """Exported blocks with the sizes that their manifests say."""
    found: list[tuple[int, BlockInfo]] = []
    for name in repository.names()[:_LOOK_AT]:
        with suppress(RepositoryError):  # one that nobody can read is no reason to skip the others
            manifest = repository.manifest(name)
            if manifest.format == FORMAT:
                found.append((manifest.size, manifest.to_info()))
    return found


def _is_data(repository: BlockRepository, block: BlockInfo) -> bool | None:
    """None: a worker that meets the same error reports it properly."""
    try:
        # Hashing all weights would take longer than what this may save.
        with repository.artifact(block.name, check=False) as path, path.open("rb") as file:
            return is_known(file, _MOST_JSON)
    except (BlockFlowError, OSError, BadZipFile, ValueError, RuntimeError):
        return None


def _launch(block: BlockInfo) -> WorkerLaunch:
    return WorkerLaunch(
        name="rehearsal",
        incarnation=1,
        stages=(StageSpec(1, block),),
        repository="",
        run_dir="",
        controller="",
        transport="ipc",
        mode="tensormq",
        device="cpu",
        threads=1,
        cores=(),
        arena_bytes=0,
        slots=1,
    )
