"""What tests of the thesis's experiments share: a Context without the command, a chain, records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockflow.bench.in_process import Chain
from blockflow.bench.thesis.experiment import Advance, Context, Settings, Workshop
from blockflow.bench.thesis.served import WAYS
from blockflow.client.collector import OK, Record
from blockflow.client.result import BlockTiming

HANDLES, TENSORS = WAYS
CHAIN = Chain(Path("blocks"), tuple(f"pt2.block{n}" for n in range(1, 5)))


@contextmanager
def silent(_what: str, _parts: int | None) -> Iterator[Advance]:
    """A step that nobody sees."""
    yield lambda: None


def context(folder: Path, workshop: Workshop | None = None, **settings: Any) -> Context:
    """Quick, with the smallest model, unless ``settings`` say otherwise."""
    chosen = Settings(**{"quick": True, "model": "digits", **settings})
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    return Context(chosen, workshop or Workshop(folder), scratch, silent)


def record(
    at_ms: float,
    took_ms: float,
    outcome: str = OK,
    timings: Sequence[BlockTiming] = (),
    task: str = "t",
) -> Record:
    return Record(task, 1, at_ms, at_ms, at_ms + took_ms, outcome, tuple(timings))
