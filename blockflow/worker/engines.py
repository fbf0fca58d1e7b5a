"""The engines of a worker's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockflow.core.launchspec import StageSpec
from blockflow.engine.base import EngineOptions, WeightStore
from blockflow.engine.registry import create_engine
from blockflow.repository.machine import fingerprint
from blockflow.worker import failpoints
from blockflow.worker.stage import Stage


def make_engines(
    specs: Sequence[StageSpec], device: str, threads: int, weights: WeightStore | None = None
) -> dict[int, Stage]:
    """The worker's stages with their engines, not loaded yet.

    Raises:
        RepositoryError: UNSUPPORTED_FORMAT, ARTIFACT_MISSING.
        BlockError: UNSUPPORTED_ENGINE.
        SystemError_: MISSING_EXTRA.
    """
    stages: dict[int, Stage] = {}
    for spec in specs:
        extra = {k: v for k, v in spec.options.items() if k != failpoints.OPTION}
        options = EngineOptions(device, threads, spec.precision, extra, weights)
        engine = create_engine(spec.block, options, spec.engine, machine=fingerprint())
        runs = replace(spec, engine=engine.name, precision=engine.options.precision)
        stages[spec.stage] = Stage(runs, engine)
    return stages
