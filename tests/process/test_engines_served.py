"""Other engines in a running system: what is asked for runs, without copies, and is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.core.errors import TopologyError
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.repository.machine import fingerprint
from blockflow.repository.manifest import Choice, VerdictForm
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests.system_rig import idle_system
from tests.variants import variant_of

WAIT_S = 10.0
SPEC = TensorSpec("float32", ("rows", 3))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def blocks(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a`` with an ONNX file, and this machine's choice of ONNX Runtime."""
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("repository")
    repository = BlockRepository(folder)
    info = variant_of(repository, LoadedModel(model, "linear", SPEC), "a", "onnx", "openvino")
    choice = Choice(
        engine="onnxruntime",
        precision="fp32",
        ms=0.1,
        reference_ms=0.2,
        error=0.0,
        tolerance=0.01,
        when="2026-01-01T00:00:00+00:00",
    )
    repository.save_choice(info, fingerprint(), choice)
    return folder


@pytest.fixture(scope="module")
def system(
    blocks: Path, tmp_path_factory: pytest.TempPathFactory, launcher: Launcher
) -> Iterator[System]:
    with idle_system(blocks, tmp_path_factory.mktemp("state"), launcher) as running:
        yield running


def told(system: System, test: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The block's document, once the worker's KPIs say what ``test`` wants."""
    found: dict[str, Any] = {}

    def look() -> dict[str, Any] | None:
        found.update(system.manager.views().block("a"))
        return found if test(found) else None

    assert system.manager.wait(look, WAIT_S) is not None, found
    return found


@pytest.mark.parametrize(
    ("asked", "runs", "copies"),
    [
        # any number of rows: computed in memory of its own
        ({"engine": "openvino"}, "openvino", 1),
        ({"engine": "openvino", "options": {"rows": [1, 4]}}, "openvino", 0),
        ({"engine": "onnxruntime"}, "onnxruntime", 0),
        ({}, "onnxruntime", 0),
        ({"precision": "bf16"}, "exported", 0),
    ],
)
def test_the_engine_that_is_asked_for_runs(
    system: System, model: nn.Module, asked: dict[str, Any], runs: str, copies: int
) -> None:
    system.apply({"blocks": [{"name": "a", **asked}], "tasks": {"t": ["a"]}})
    x = torch.randn(4, 3)
    with Client(system.client_endpoint) as client:
        y = client.infer("t", x.numpy(), deadline_s=20).value
    np.testing.assert_allclose(y, model(x).numpy(), rtol=0.05, atol=0.05)
    block = told(system, lambda b: b["engine"] == runs and b["kpi"].get("requests", 0) >= 1)
    assert block["engine_asked"] == asked.get("engine", "auto")
    assert block["precision"] == asked.get("precision", "fp32")
    assert block["variants"] == ["onnx"]
    kpi = block["kpi"]
    assert (kpi["copies_in"], kpi["bytes_copied_in"], kpi["copies_out"]) == (0, 0, copies)
    assert kpi["bytes_out"] == 4 * 2 * 4


def test_a_worker_that_runs_onnx_runtime_computes_in_one_thread(system: System) -> None:
    system.apply({"blocks": [{"name": "a", "engine": "onnxruntime"}], "tasks": {"t": ["a"]}})
    with Client(system.client_endpoint) as client:
        client.infer("t", np.zeros((1, 3), np.float32), deadline_s=20)
    (pid,) = [w["pid"] for w in system.commands.workers() if w["name"].startswith("a")]
    names = {Path(f"/proc/{pid}/task/{t}/comm").read_text().strip()
             for t in os.listdir(f"/proc/{pid}/task")}  # fmt: skip
    assert not [n for n in names if "ort" in n.lower() or "telemetry" in n.lower()]


def test_what_cannot_run_is_refused_with_its_path(system: System) -> None:
    before = system.commands.workers()
    body = {
        "blocks": [{"name": "a", "engine": "openvino", "precision": "int8"}],
        "tasks": {"t": ["a"]},
    }
    with pytest.raises(TopologyError) as e:
        system.apply(body)
    (problem,) = e.value.problems
    assert problem.path == "$.blocks[0].engine"
    assert "blockflow convert a@1 --to onnx-int8" in problem.hint
    assert [w["pid"] for w in system.commands.workers()] == [w["pid"] for w in before]


def test_a_refused_engine_is_refused_with_what_was_found_and_told(
    system: System, blocks: Path
) -> None:
    repository = BlockRepository(blocks)
    form = repository.manifest("a").variants["onnx"]
    why = "differs by 0.5 on [8, 3], allowed is 0.0001"
    with repository.artifact("a", variant="onnx") as path:
        data = path.read_bytes()
    digest = repository.info("a").digest
    unfit = form.model_copy(update={"engines": {"onnxruntime": VerdictForm(refused=why)}})
    repository.save_variant("a", "onnx", unfit, data, digest=digest)
    try:
        body: dict[str, Any] = {
            "blocks": [{"name": "a", "engine": "onnxruntime"}],
            "tasks": {"t": ["a"]},
        }
        with pytest.raises(TopologyError) as e:
            system.apply(body)
        (problem,) = e.value.problems
        assert problem.path == "$.blocks[0].engine" and why in problem.message
        body["blocks"][0]["engine"] = "auto"  # the choice was made before the verdict
        system.apply(body)
        block = told(system, lambda b: b["engine"] == "exported")
        assert block["refused_engines"] == {"onnx": {"onnxruntime": why}}
    finally:
        repository.save_variant("a", "onnx", form, data, digest=digest)
