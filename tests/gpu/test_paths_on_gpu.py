"""Paths over CPU and GPU blocks, fan-out to both, two GPUs, and the way over the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.core.model import TensorSpec
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, load_model
from tests.gpu.rig import devices
from tests.system_rig import idle_system

WAIT_S = 30.0
WIDTH = 64
X = np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def layer() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).eval()


@pytest.fixture
def system(layer: torch.nn.Module, tmp_path: Path) -> Iterator[System]:
    loaded = LoadedModel(layer, "layer", TensorSpec("float32", ("rows", WIDTH)))
    export_model(loaded, BlockRepository(tmp_path / "blocks"), names=["layer"])
    with idle_system(tmp_path / "blocks", tmp_path / "state") as made:
        yield made


def block(name: str, device: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "block": "layer", "device": device, **options}


def expected(layer: torch.nn.Module, times: int) -> np.ndarray:
    y = torch.from_numpy(X)
    with torch.inference_mode():
        for _ in range(times):
            y = layer(y)
    return y.numpy()


def counts(system: System, name: str, key: str) -> int:
    """A counter of a worker, once it has been reported."""
    return sum(
        w["process"][key]
        for w in system.status()["workers"]
        if name in w["blocks"] and w["process"]
    )


def settled(system: System, name: str, key: str, wanted: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    # Until its first routes a worker counts the readiness probe, too.
    while counts(system, name, key) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return counts(system, name, key) == wanted


def test_results_land_while_the_next_batches_are_ordered(
    system: System, layer: torch.nn.Module
) -> None:
    placed = [block("g1", "cuda:0"), block("g2", "cuda:0")]
    system.apply({"blocks": placed, "tasks": {"t": ["g1", "g2"]}})
    inputs = [X * factor for factor in range(1, 33)]
    with Client(system.client_endpoint) as client:
        pending = [client.submit("t", x) for x in inputs]
        for x, answer in zip(inputs, pending, strict=True):
            with torch.inference_mode():
                wanted = layer(layer(torch.from_numpy(x))).numpy()
            assert np.allclose(answer.result(WAIT_S).value, wanted, atol=1e-4)
    assert settled(system, "g2", "d2h_copies", len(inputs))
    assert settled(system, "g1", "h2d_copies", len(inputs))


def test_cpu_and_gpu_blocks_in_one_path(system: System, layer: torch.nn.Module) -> None:
    placed = {"c1": "cpu", "g1": "cuda:0", "c2": "cpu", "g2": "cuda:0", "g3": "cuda:0"}
    system.apply(
        {"blocks": [block(n, d) for n, d in placed.items()], "tasks": {"mixed": list(placed)}}
    )
    with Client(system.client_endpoint) as client:
        for _ in range(10):
            got = client.infer("mixed", X).value
            assert np.allclose(got, expected(layer, 5), atol=1e-4)
    # c1 -> g1 and c2 -> g2 up, g1 -> c2 and g3 -> Dispatcher down; g2 -> g3 stays on the device.
    for name, key, wanted in [
        ("g1", "h2d_copies", 10),
        ("g1", "d2h_copies", 10),
        ("g2", "h2d_copies", 10),
        ("g2", "d2h_copies", 0),
        ("g3", "h2d_copies", 0),
        ("g3", "d2h_copies", 10),
    ]:
        assert settled(system, name, key, wanted), (name, key, counts(system, name, key))


def test_a_trunk_with_heads_on_both(system: System, layer: torch.nn.Module) -> None:
    blocks = [block("trunk", "cuda:0"), block("near", "cuda:0"), block("far", "cpu")]
    tasks = {"a": ["trunk", "near"], "b": ["trunk", "far"], "c": ["trunk"]}
    system.apply({"blocks": blocks, "tasks": tasks})
    with Client(system.client_endpoint) as client:
        for _ in range(5):
            got = client.infer(("a", "b", "c"), X)
            assert np.allclose(got["a"].value, expected(layer, 2), atol=1e-4)
            assert np.allclose(got["b"].value, expected(layer, 2), atol=1e-4)
            assert np.allclose(got["c"].value, expected(layer, 1), atol=1e-4)


def test_blocks_in_one_worker_stay_on_the_device(system: System, layer: torch.nn.Module) -> None:
    blocks = [block(n, "cuda:0", worker="one") for n in ("x", "y", "z")]
    system.apply({"blocks": blocks, "tasks": {"t": ["x", "y", "z"]}})
    with Client(system.client_endpoint) as client:
        for _ in range(5):
            assert np.allclose(client.infer("t", X).value, expected(layer, 3), atol=1e-4)
    assert settled(system, "x", "h2d_copies", 5)
    assert settled(system, "x", "d2h_copies", 5)


def test_two_gpus(system: System, layer: torch.nn.Module) -> None:
    if len(devices()) < 2:
        pytest.skip("one GPU on this machine")
    blocks = [block("p", "cuda:0"), block("q", "cuda:1")]
    system.apply({"blocks": blocks, "tasks": {"t": ["p", "q"]}})
    with Client(system.client_endpoint) as client:
        for _ in range(5):
            assert np.allclose(client.infer("t", X).value, expected(layer, 2), atol=1e-4)


def test_whole_tensors_over_the_host(system: System, layer: torch.nn.Module) -> None:
    """The way without device handles: what a fallback does, and the thesis's baseline."""
    blocks = [block(n, "cuda:0", mode="zeromq") for n in ("u", "v")]
    system.apply({"blocks": blocks, "tasks": {"t": ["u", "v"]}})
    with Client(system.client_endpoint) as client:
        for _ in range(5):
            assert np.allclose(client.infer("t", X).value, expected(layer, 2), atol=1e-4)
    assert settled(system, "u", "d2h_copies", 5) and settled(system, "v", "h2d_copies", 5)


def test_inputs_of_several_lengths(system: System, tmp_path: Path) -> None:
    """Padded on the device, cut out of its memory by the next worker and by the host."""
    tokens = TensorSpec("int64", ("rows", "length"), {"length": (1, 16)})
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 32, "max_length": 16}
    loaded = load_model("transformer-tokens", arguments=sizes, input_spec=tokens, int_below=32)
    encoder = loaded.module
    most = torch.nn.Sequential(encoder.get_submodule("embedding"), encoder.get_submodule("layers"))
    names, cuts = ["embed", "encode", "norm"], ["layers", "norm"]
    export_model(loaded, BlockRepository(tmp_path / "blocks"), names=names, cuts=cuts)
    batching = {"policy": "window", "max_rows": 6, "max_delay_ms": 100, "classes": [16]}
    on = {"embed": "cuda:0", "encode": "cuda:0", "norm": "cpu"}
    blocks = [{"name": n, "device": d, "batching": batching} for n, d in on.items()]
    system.apply({"blocks": blocks, "tasks": {"all": names, "most": names[:2]}})
    rng = np.random.default_rng(1)
    inputs = [rng.integers(0, 32, (2, n)) for n in (3, 16, 7)]
    with Client(system.client_endpoint) as client, torch.inference_mode():
        for task, model in (("all", encoder), ("most", most)):
            pending = [client.submit(task, x, deadline_s=WAIT_S) for x in inputs]
            for x, one in zip(inputs, pending, strict=True):
                alone = model(torch.from_numpy(x)).numpy()
                assert np.allclose(one.result().value, alone, atol=1e-4)


def test_device_times_and_memory_are_reported(system: System) -> None:
    system.apply(
        {"blocks": [block("g", "cuda:0"), block("h", "cuda:0")], "tasks": {"t": ["g", "h"]}}
    )
    with Client(system.client_endpoint) as client:
        for _ in range(5):
            client.infer("t", X)
    assert settled(system, "g", "h2d_copies", 5)
    worker = next(w for w in system.status()["workers"] if "g" in w["blocks"])
    device = worker["stages"][0]["kpi"]["device"]
    assert device["count"] == 5 and device["p50_ms"] >= 0
