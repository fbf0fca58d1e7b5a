"""Every zoo model in blocks on the GPU gives what it gives in one process, at all batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, load_model
from blockflow.repository.zoo.catalog import ZOO
from tests.system_rig import idle_system

MODELS = [name for name, model in ZOO.items() if model.cuts]
BATCHES = (1, 2, 3, 8, 17, 32)
TOLERANCE = 2e-3
"""Of the largest output: a GPU sums in another order than the CPU. TF32 would add up to more."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[str, LoadedModel]:
    return request.param, load_model(request.param, seed=0)


@pytest.fixture
def system(model: tuple[str, LoadedModel], tmp_path: Path) -> Iterator[System]:
    name, loaded = model
    cuts = ZOO[name].cuts
    blocks = [f"b{i}" for i in range(len(cuts) + 1)]
    export_model(loaded, BlockRepository(tmp_path / "blocks"), names=blocks, cuts=tuple(cuts))
    with idle_system(tmp_path / "blocks", tmp_path / "state") as made:
        placed: list[dict[str, Any]] = [{"name": b, "device": "cuda:0"} for b in blocks]
        made.apply({"blocks": placed, "tasks": {"all": blocks}})
        yield made


def example(loaded: LoadedModel, rows: int) -> np.ndarray:
    rng = np.random.default_rng(rows)
    dims = loaded.input.resolve({"rows": rows, **dict.fromkeys(loaded.input.ranges, 16)})
    if loaded.input.dtype.startswith("int"):
        return rng.integers(0, loaded.int_below, dims).astype(loaded.input.dtype)
    return rng.standard_normal(dims, dtype=np.float32)


def test_the_pipeline_equals_the_model(model: tuple[str, LoadedModel], system: System) -> None:
    _, loaded = model
    with Client(system.client_endpoint) as client:
        for rows in BATCHES:
            x = example(loaded, rows)
            got = client.infer("all", x, deadline_s=60.0).value
            with torch.inference_mode():
                want = loaded.module(torch.from_numpy(x)).numpy()
            assert got.shape == want.shape
            assert np.abs(got - want).max() <= TOLERANCE * max(1.0, np.abs(want).max()), rows
    copies = [w["process"] for w in system.status()["workers"]]
    assert all(k is not None for k in copies)
