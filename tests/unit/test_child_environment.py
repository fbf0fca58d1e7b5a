"""What a child's environment says before it starts."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from blockflow.core.caches import INDUCTOR, private_compiler_cache
from blockflow.launch.environment import MALLOC, child_command, child_environment

ROOT = Path(__file__).resolve().parents[2]


def test_environment() -> None:
    base = {"MALLOC_ARENA_MAX": "3", "A": "b", "HOME": "/home/me"}
    env = child_environment(base)
    assert env["MALLOC_MMAP_MAX_"] == "0"
    assert env["MALLOC_ARENA_MAX"] == "3" and env["A"] == "b"  # the operator's choice stays
    assert env["MALLOC_TRIM_THRESHOLD_"] == str(1 << 32)
    for pool in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"):
        assert env[f"{pool}_NUM_THREADS"] == "1"
    assert env["PYTHONUNBUFFERED"] == env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert str(ROOT) in env["PYTHONPATH"].split(os.pathsep)
    assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "1"  # no processes of a worker's own
    assert INDUCTOR in env
    tuned = {k: v for k, v in child_environment(base={}).items() if k.startswith("MALLOC_")}
    assert tuned == MALLOC
    assert tuned["MALLOC_ARENA_MAX"] == "1" and tuned["MALLOC_TOP_PAD_"] == str(64 << 20)
    chosen = {"PYTORCH_NVML_BASED_CUDA_CHECK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    assert child_environment(base=chosen).items() >= chosen.items()


def test_the_current_folder_goes_by_its_name_and_each_folder_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", ["", "/a", "/b", "/a"])
    assert child_environment(base={})["PYTHONPATH"] == os.pathsep.join([os.getcwd(), "/a", "/b"])
    assert child_command("m", "x")[1:] == ["-P", "-m", "m", "x"], "nothing is taken from there"


@pytest.mark.parametrize(
    ("env", "where"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/blockflow/inductor"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/fast"}, "/fast/blockflow/inductor"),
        ({"HOME": "/home/me", INDUCTOR: "/chosen"}, "/chosen"),
        ({"HOME": "/home/me", INDUCTOR: "/chosen/torchinductor_me"}, "/chosen/torchinductor_me"),
        ({"HOME": "/home/me", INDUCTOR: "/tmp/mine"}, "/tmp/mine"),
        ({"HOME": "/h", INDUCTOR: "/tmp/torchinductor_me"}, "/h/.cache/blockflow/inductor"),
        (
            {"HOME": "/h", "TMPDIR": "/scratch/", INDUCTOR: "/scratch/torchinductor_me"},
            "/h/.cache/blockflow/inductor",
        ),
        ({"XDG_CACHE_HOME": "relative"}, None),
        ({}, None),
    ],
)
def test_what_a_compiler_loads_again_lies_where_nobody_else_can_put_it(
    env: dict[str, str], where: str | None
) -> None:
    private_compiler_cache(env)
    assert env.get(INDUCTOR) == where


def test_torchs_own_choice_of_a_folder_is_none_that_was_made() -> None:
    """It is in the environment as soon as a part of torch has been imported."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    chosen = {"HOME": "/h", "TMPDIR": tempfile.gettempdir(), INDUCTOR: default_cache_dir()}
    private_compiler_cache(chosen)
    assert chosen[INDUCTOR] == "/h/.cache/blockflow/inductor"
