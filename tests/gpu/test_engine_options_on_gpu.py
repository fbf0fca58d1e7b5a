"""CUDA graphs and torch.compile as engine options: right results, really used, and bounded."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.copies import RunCopies
from blockflow.engine.registry import create_engine
from blockflow.engine.replay import GRAPHS_KEPT, graphed
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.memory import open_device
from tests.engine_rig import SPEC, model
from tests.gpu import test_paths_on_gpu as suite
from tests.gpu.rig import REAL
from tests.gpu.test_paths_on_gpu import WAIT_S, X, block, expected

pytestmark = pytest.mark.skipif(not REAL, reason="the double computes on the CPU, without either")

layer, system = suite.layer, suite.system
OPTIONS: Mapping[str, dict[str, Any]] = {
    "cuda_graph": {"cuda_graph": True},
    "compile": {"compile": True},
    "both": {"cuda_graph": True, "compile": True},
}
SEGMENT = 2 << 20
"""Bytes: the least that torch's allocator takes from the driver."""

TOLERANCE = 1e-4
"""A GPU sums in another order; TF32, which it does not use, would be off by more."""


@pytest.fixture(params=list(OPTIONS))
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return OPTIONS[request.param]


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    made = CudaDevice(open_device("cuda:0"))
    with torch.inference_mode(), made.api.engine_scope(made.stream):
        yield made
    assert made.close()


@pytest.fixture
def engine(
    options: dict[str, Any], device: CudaDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """As a worker has it: loaded and run in its own stream, while another thread waits for the
    device (which a capture must bear), and without a pool of processes to compile in."""
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    repo = BlockRepository(tmp_path)
    export_model(LoadedModel(model(), "conv", SPEC), repo, names=["conv"])
    made = create_engine(repo.info("conv"), EngineOptions("cuda:0", 1, "fp32", options), "exported")
    with repo.artifact("conv") as path:
        made.load(path)
    yield made
    made.close()


def run(engine: Engine, device: CudaDevice, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, what the model gives on the CPU), with work of the completions' thread beside."""
    x = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(rows))
    device.completions.after(device.stream, lambda: None)
    y = engine.run(x.to("cuda:0"))
    return y.cpu(), model()(x)


@pytest.mark.timeout(600)
def test_results_are_the_plain_ones_at_every_batch_size(
    engine: Engine, device: CudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    for rows in (1, 2, 8, 32, 1, 8):  # some by what was prepared for them before
        got, want = run(engine, device, rows)
        assert got.shape == want.shape
        assert (got - want).abs().max() <= TOLERANCE * max(1.0, float(want.abs().max())), rows
    assert "runs eagerly" not in caplog.text, "the option was used, and did not fall back"


@pytest.mark.timeout(600)
def test_what_a_run_returned_is_not_written_again(engine: Engine, device: CudaDevice) -> None:
    """A recorded graph writes to the same memory at every replay."""
    first, want = run(engine, device, 4)
    kept = engine.run(torch.zeros(4, 3, 8, 8, device="cuda:0"))
    before = kept.clone()
    engine.run(torch.ones(4, 3, 8, 8, device="cuda:0"))
    assert torch.equal(kept, before)
    assert (first - want).abs().max() <= TOLERANCE * max(1.0, float(want.abs().max()))


def test_graphs_are_bounded(
    device: CudaDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repo = BlockRepository(tmp_path)
    export_model(LoadedModel(model(), "conv", SPEC), repo, names=["conv"])
    made = create_engine(
        repo.info("conv"), EngineOptions("cuda:0", 1, "fp32", OPTIONS["cuda_graph"]), "exported"
    )
    with repo.artifact("conv") as path:
        made.load(path)
    for rows in range(1, GRAPHS_KEPT + 3):
        got, want = run(made, device, rows)
        assert (got - want).abs().max() <= TOLERANCE * max(1.0, float(want.abs().max())), rows
    assert f"{GRAPHS_KEPT} are kept" in caplog.text
    torch.cuda.synchronize()
    reserved = device.api.pool_bytes()[1]
    for _ in range(3):
        for rows in range(1, GRAPHS_KEPT + 1):
            run(made, device, rows)
    torch.cuda.synchronize()
    assert device.api.pool_bytes()[1] == reserved, "replays take no further memory"
    made.close()


class Reads(torch.nn.Module):
    """Asks the device for a value, which no capture allows, and computes on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3


def test_what_cannot_be_captured_runs_on_in_its_stream(
    device: CudaDevice, caplog: pytest.LogCaptureFixture
) -> None:
    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    own = torch.cuda.current_stream()
    Reads()(torch.ones(4, 1 << 20, device="cuda:0"))
    before = reserved()
    replay = graphed(Reads(), RunCopies())
    for rows in (1, 2, 1, 1, 1, 4):
        x = torch.ones(rows, 1 << 20, device="cuda:0")
        assert torch.equal(replay(x), x * 2)
        assert torch.cuda.current_stream() == own
    assert "runs eagerly" in caplog.text
    del x
    # Five were tried. What stays is a segment of the smallest size: the graphs' own counters.
    assert reserved() - before <= SEGMENT, "no pool is kept for captures that failed"
    # and the next that can be is captured
    doubled = graphed(lambda x: x * 2, copied := RunCopies())
    x = torch.ones(2, 2, device="cuda:0")
    assert torch.equal(doubled(x), x * 2) and torch.equal(doubled(x), x * 2)
    assert copied.outputs == 2


@pytest.mark.timeout(600)
def test_blocks_with_options_pass_tensors_by_handle(
    options: dict[str, Any], system: System, layer: torch.nn.Module
) -> None:
    """What a graph reads and writes lies in other workers' slabs, at addresses that change."""
    blocks = [block(n, "cuda:0", engine="exported", options=options) for n in ("p", "q")]
    system.apply({"blocks": blocks, "tasks": {"t": ["p", "q"]}})
    with Client(system.client_endpoint) as client:
        for rows in (1, 3, 1, 2, 3, 1):
            got = client.infer("t", X[:rows], deadline_s=2 * WAIT_S).value
            assert np.allclose(got, expected(layer, 2)[:rows], atol=TOLERANCE)
    assert suite.settled(system, "p", "h2d_copies", 6)
    assert suite.settled(system, "q", "d2h_copies", 6)
    assert suite.counts(system, "p", "d2h_copies") == suite.counts(system, "q", "h2d_copies") == 0
