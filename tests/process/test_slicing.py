"""A chain whose stages the control plane slices by itself, served under ``dvabatch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests.system_rig import served
from tests.unit.test_stages import profile

SPEC = TensorSpec("float32", ("rows", 16))
NAMES = ["b0", "b1", "b2", "b3"]


def body(batching: Any) -> dict[str, Any]:
    shared = {"worker": "chain", "threads": 1, "lanes": 1, "engine": "exported"}
    blocks = [{"name": b, **shared, "batching": batching} for b in NAMES]
    return {"blocks": blocks, "tasks": {"all": NAMES, "half": NAMES[:2]}}


def requests() -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Of one to three rows, through all of the chain or half of it."""
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal((1 + k % 3, 16)).astype(np.float32) for k in range(48)]
    return [("half" if k % 5 == 4 else "all", x) for k, x in enumerate(inputs)]


def one_by_one(system: System) -> list[np.ndarray[Any, Any]]:
    with Client(system.client_endpoint) as client:
        return [client.infer(task, x, deadline_s=60).value for task, x in requests()]


def all_at_once(system: System) -> list[np.ndarray[Any, Any]]:
    """(As many as a task takes whatever its queues are like: two of its largest batches.)"""
    with Client(system.client_endpoint) as client:
        waiting = [client.submit(task, x, deadline_s=60) for task, x in requests()]
        return [w.result(60).value for w in waiting]


def test_auto_stages_are_resolved_shown_and_served(tmp_path: Path, launcher: Launcher) -> None:
    repository = BlockRepository(tmp_path / "blocks")
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 16)]
    model = nn.Sequential(*layers).eval()
    export_model(LoadedModel(model, "net", SPEC), repository, names=NAMES, cuts=["1", "2", "3"])
    profile(repository, {"b0": (9.0, 0.1), "b1": (9.0, 0.1), "b2": (18.0, 0.2), "b3": (18.0, 0.2)})
    asked = {"policy": "dvabatch", "join": "always", "stages": "auto"}
    with served(tmp_path, body("none"), launcher) as system:
        alone = one_by_one(system)
        update = system.apply(body(asked))["update"]
        (note,) = [n for n in update["notes"] if "stages" in n]
        policy = system.commands.block("b0")["batching"]
        sizes = policy["stages"]
        assert sum(sizes) == 4 and 1 < len(sizes) < 5
        assert note.startswith("worker chain: stages b0") and note.count(", ") == len(sizes) - 1
        (worker,) = system.status()["workers"]
        assert [s["batching"] for s in worker["stages"]] == [policy] * 4
        for got, expected in zip(all_at_once(system), alone, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        profile(repository, dict.fromkeys(NAMES, (0.0, 3.0)))
        system.apply(body(asked))  # the same request, other profiles
        assert system.commands.block("b0")["batching"]["stages"] == [4]
        for got, expected in zip(all_at_once(system), alone, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
