"""A Context for one of the thesis's experiments, outside of ``blockflow bench thesis``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockflow.bench.thesis.experiment import Advance, Context, Settings, Workshop


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
