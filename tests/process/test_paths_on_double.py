"""Whole systems with blocks on devices, on the double of the CUDA driver: those tests of tests/gpu
that a machine without a GPU can run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockflow.tensormq.cuda_fake_world import World
from blockflow.tensormq.memory import DOUBLE_ENV
from tests.gpu import test_paths_on_gpu as suite

layer, system = suite.layer, suite.system
test_cpu_and_gpu_blocks_in_one_path = suite.test_cpu_and_gpu_blocks_in_one_path
test_a_trunk_with_heads_on_both = suite.test_a_trunk_with_heads_on_both
test_blocks_in_one_worker_stay_on_the_device = suite.test_blocks_in_one_worker_stay_on_the_device
test_two_gpus = suite.test_two_gpus
test_whole_tensors_over_the_host = suite.test_whole_tensors_over_the_host
test_inputs_of_several_lengths = suite.test_inputs_of_several_lengths
test_device_times_and_memory_are_reported = suite.test_device_times_and_memory_are_reported


@pytest.fixture(autouse=True)
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "double"
    folder.mkdir()
    monkeypatch.setenv(DOUBLE_ENV, str(folder))
    yield folder
    world = World(folder, os.getpid())
    assert world.broken_rules() == []
    assert world.names("mem") == [], "workers that stop in order free their slabs"
