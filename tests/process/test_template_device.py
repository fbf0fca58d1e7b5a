"""The template never touches CUDA: a context, and even an initialised driver, is lost in a fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from blockflow.launch.environment import child_environment
from blockflow.repository.repository import BlockRepository
from tests.control_rig import echo_repository

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import sys
import torch, torch.cuda

asked = []

def spy(name, answer):
    def call(*args, **kwargs):
        asked.append(name)
        return answer
    return call

# What initialises the driver, or torch's side of it, in a build with CUDA.
for name, answer in (("is_available", True), ("device_count", 1), ("_lazy_init", None)):
    setattr(torch.cuda, name, spy(name, answer))
for name in ("_cuda_init", "_cuda_getDeviceCount"):
    setattr(torch._C, name, spy(name, 1))

from blockflow.launch.preload import (
    BASE_MODULES, LOADER_MODULES, REHEARSAL, modules_of, preload,
)
from blockflow.launch.template import rehearse

preload(BASE_MODULES)
preload(modules_of(LOADER_MODULES))
rehearse([[REHEARSAL, {"repository": sys.argv[1]}]])
assert "blockflow.tensormq.cuda_driver" not in sys.modules, "the driver's module is loaded"
assert not torch.cuda.is_initialized()
with open("/proc/self/maps") as maps:
    assert not any("libcuda.so" in line for line in maps) or torch.version.cuda, "libcuda is mapped"
print("asked", asked)
"""


def test_preloading_and_rehearsing_leave_the_device_alone(tmp_path: Path) -> None:
    repository: BlockRepository = echo_repository(tmp_path / "blocks")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(repository.root)],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (done.returncode, done.stdout) == (0, "asked []\n"), done.stderr


def test_children_ask_for_devices_without_initialising_the_driver() -> None:
    assert child_environment()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert (
        child_environment(base={"PYTORCH_NVML_BASED_CUDA_CHECK": "0"})[
            "PYTORCH_NVML_BASED_CUDA_CHECK"
        ]
        == "0"
    )
