"""What a child's environment says before it starts."""

from __future__ import annotations

import os
from pathlib import Path

from blockflow.launch.environment import MallocTuning, child_environment

ROOT = Path(__file__).resolve().parents[2]


def test_environment() -> None:
    env = child_environment(MallocTuning(top_pad=7), {"MALLOC_ARENA_MAX": "3", "A": "b"})
    assert env["MALLOC_TOP_PAD_"] == "7" and env["MALLOC_MMAP_MAX_"] == "0"
    assert env["MALLOC_ARENA_MAX"] == "3" and env["A"] == "b"  # the operator's choice stays
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "1"
    assert str(ROOT) in env["PYTHONPATH"].split(os.pathsep)
    assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "1"  # no processes of a worker's own
