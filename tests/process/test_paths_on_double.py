"""Whole systems with blocks on devices, on the double of the CUDA driver: those tests of tests/gpu
that a machine without a GPU can run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from warm_rig import Warm

from blockflow.control.system import System
from blockflow.core.errors import TopologyError
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.tensormq.cuda_fake_world import World
from blockflow.tensormq.cuda_here import DOUBLE_ENV
from tests.gpu import test_paths_on_gpu as suite
from tests.system_rig import idle_system

layer = suite.layer
test_results_land_while_the_next_batches_are_ordered = (
    suite.test_results_land_while_the_next_batches_are_ordered
)
test_cpu_and_gpu_blocks_in_one_path = suite.test_cpu_and_gpu_blocks_in_one_path
test_a_trunk_with_heads_on_both = suite.test_a_trunk_with_heads_on_both
test_blocks_in_one_worker_stay_on_the_device = suite.test_blocks_in_one_worker_stay_on_the_device
test_two_gpus = suite.test_two_gpus
test_whole_tensors_over_the_host = suite.test_whole_tensors_over_the_host
test_inputs_of_several_lengths = suite.test_inputs_of_several_lengths
test_device_times_and_memory_are_reported = suite.test_device_times_and_memory_are_reported


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the double's devices are; systems come and go."""
    return tmp_path_factory.mktemp("double")


@pytest.fixture(scope="module")
def launcher(folder: Path, warm: Warm) -> Iterator[Launcher]:
    with warm.own_template(**{DOUBLE_ENV: str(folder)}) as template:
        yield template


@pytest.fixture(scope="module")
def exported(layer: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    blocks = tmp_path_factory.mktemp("exported") / "blocks"
    loaded = LoadedModel(layer, "layer", TensorSpec("float32", ("rows", suite.WIDTH)))
    export_model(loaded, BlockRepository(blocks), names=["layer"])
    return blocks


@pytest.fixture
def system(exported: Path, tmp_path: Path, launcher: Launcher) -> Iterator[System]:
    shutil.copytree(exported, tmp_path / "blocks")
    with idle_system(tmp_path / "blocks", tmp_path / "state", launcher) as made:
        yield made


@pytest.fixture(autouse=True)
def double(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(DOUBLE_ENV, str(folder))
    yield
    world = World(folder, os.getpid())
    assert world.broken_rules() == []
    assert world.names("mem") == [], "workers that stop in order free their slabs"


def test_a_device_that_is_not_there_is_a_problem_of_the_update(system: System) -> None:
    blocks = [
        {"name": n, "block": "layer", "device": n.replace("_", ":")} for n in ("cuda_1", "cuda_2")
    ]
    with pytest.raises(TopologyError) as e:
        system.apply({"blocks": blocks, "tasks": {"t": ["cuda_1", "cuda_2"]}})
    (problem,) = e.value.problems
    assert (e.value.code, problem.path) == ("INVALID_TOPOLOGY", "$.blocks[1].device")
    assert "there is no cuda:2" in problem.message and "cuda:0, cuda:1" in problem.message
