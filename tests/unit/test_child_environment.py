"""What a child's environment says before it starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blockflow.core.caches import INDUCTOR, private_compiler_cache
from blockflow.launch.environment import MallocTuning, child_environment

ROOT = Path(__file__).resolve().parents[2]


def test_environment() -> None:
    env = child_environment(MallocTuning(top_pad=7), {"MALLOC_ARENA_MAX": "3", "A": "b"})
    assert env["MALLOC_TOP_PAD_"] == "7" and env["MALLOC_MMAP_MAX_"] == "0"
    assert env["MALLOC_ARENA_MAX"] == "3" and env["A"] == "b"  # the operator's choice stays
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "1"
    assert str(ROOT) in env["PYTHONPATH"].split(os.pathsep)
    assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "1"  # no processes of a worker's own
    assert INDUCTOR in env


def test_what_a_compiler_loads_again_lies_where_nobody_else_can_put_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for env, where in (
        ({}, "/home/me/.cache/blockflow/inductor"),
        ({"XDG_CACHE_HOME": "/fast"}, "/fast/blockflow/inductor"),
        ({INDUCTOR: "/chosen"}, "/chosen"),
    ):
        private_compiler_cache(env)
        assert env[INDUCTOR] == where
    nowhere = {"XDG_CACHE_HOME": "relative"}
    private_compiler_cache(nowhere)
    assert INDUCTOR not in nowhere
