"""Blocks whose output's dims follow from their input's: a trunk with strides, of sounds of any
length, whose heads take what is left of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blockflow.client.sync import Client
from blockflow.control.system import System
from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.repository.export import export_tree
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests.system_rig import idle_system

SOUND = TensorSpec("float32", ("rows", "length"), {"length": (40, 400)})


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ears = nn.Sequential(nn.Conv1d(1, 8, 10, 5), nn.GELU(), nn.Conv1d(8, 16, 3, 2))
        self.letters, self.speaker = nn.Linear(16, 5), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        frames = self.ears(x.unsqueeze(1)).transpose(1, 2)
        return self.letters(frames), self.speaker(frames.mean(1))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Speech().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def blocks(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    named = {"ears": "ears", "letters": "letters", "speaker": "speaker"}
    export_tree(LoadedModel(model, "speech", SOUND), BlockRepository(folder), blocks=named)
    short = LoadedModel(model.ears, "ears", TensorSpec("float32", ("rows", 1, 99)))
    export_tree(short, BlockRepository(folder), blocks={"first": "0", "last": "2"})
    return folder


@pytest.fixture(scope="module")
def system(
    blocks: Path, tmp_path_factory: pytest.TempPathFactory, launcher: Launcher
) -> Iterator[System]:
    with idle_system(blocks, tmp_path_factory.mktemp("state"), launcher) as running:
        yield running


def update(batching: dict[str, Any], **block: Any) -> dict[str, Any]:
    names = ("ears", "letters", "speaker")
    return {
        "blocks": [{"name": n, "batching": batching, **block} for n in names],
        "tasks": {"letters": ["ears", "letters"], "speaker": ["ears", "speaker"]},
    }


@pytest.mark.parametrize(
    ("batching", "block"),
    [
        ({"policy": "none"}, {}),
        ({"policy": "window", "max_rows": 8, "max_delay_ms": 5}, {}),
        ({"policy": "window", "max_rows": 8, "max_delay_ms": 5}, {"mode": "zeromq"}),
        ({"policy": "dvabatch", "bs_max": 8}, {"worker": "all"}),
    ],
)
def test_sounds_of_many_lengths_are_served(
    system: System, model: nn.Module, batching: dict[str, Any], block: dict[str, Any]
) -> None:
    system.apply(update(batching, **block))
    drawn = np.random.default_rng(1)
    lengths = [40, 400, *drawn.integers(40, 401, 22), *[77] * 8]
    inputs = [drawn.standard_normal((1 + i % 3, n), np.float32) for i, n in enumerate(lengths)]
    with Client(system.client_endpoint) as client:
        assert str(client.tasks()["letters"].contract.output) == (
            "float32[rows, length // 10 - 1, 5]"
        )
        sent = [client.submit(["letters", "speaker"], x, deadline_s=30) for x in inputs]
        for x, future in zip(inputs, sent, strict=True):
            answers = future.result()
            letters, speaker = model(torch.from_numpy(x))
            assert letters.shape[1] == (x.shape[1] - 10) // 10
            np.testing.assert_allclose(answers["letters"].value, letters.numpy(), atol=1e-5)
            np.testing.assert_allclose(answers["speaker"].value, speaker.numpy(), atol=1e-5)


def test_what_is_out_of_range_is_refused_and_the_rest_served(
    system: System, model: nn.Module
) -> None:
    system.apply(update({"policy": "none"}))
    with Client(system.client_endpoint) as client:
        for n in (1, 9, 39, 401):
            with pytest.raises(RequestError, match=r"outside 40\.\.400") as e:
                client.infer("letters", np.zeros((1, n), np.float32), deadline_s=20)
            assert e.value.code == "CONTRACT_MISMATCH"
        x = np.ones((2, 50), np.float32)
        y = client.infer("letters", x, deadline_s=20).value
    np.testing.assert_allclose(y, model(torch.from_numpy(x))[0].numpy(), atol=1e-5)


def test_a_path_that_does_not_fit_shows_the_formula(system: System) -> None:
    body = update({"policy": "none"})
    body["blocks"].append({"name": "last"})
    body["tasks"]["odd"] = ["ears", "last"]
    with pytest.raises(TopologyError) as e:
        system.apply(body)
    (problem,) = e.value.problems
    assert problem.path == "$.tasks.odd[1]" and "length // 10 - 1" in problem.message
