"""What a template preloads: all that a load and a run import, no thread, and nothing of CUDA: a
context, and even an initialised driver, is lost in a fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from control_rig import echo_repository
from torch import nn

from blockflow.launch.environment import child_environment

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, os, sys, traceback
from blockflow.core.engines import TORCH_EXPORT
from blockflow.launch.preload import (
    BASE_MODULES, LOADER_MODULES, REHEARSAL, modules_of, preload,
)
from blockflow.launch.template import rehearse
import torch, torch.cuda

asked = []
own = []

def spy(name, answer):
    def call(*args, **kwargs):
        asked.append(name)
        return answer
    return call

# What initialises the driver, or torch's side of it. Where a build without CUDA lacks a name, it
# stays away: by that torch knows what it is, and would fail to import the rest.
for owner, name, answer in (
    (torch.cuda, "is_available", True),
    (torch.cuda, "device_count", 1),
    (torch.cuda, "_lazy_init", None),
    (torch._C, "_cuda_init", 1),
    (torch._C, "_cuda_getDeviceCount", 1),
):
    if hasattr(owner, name):
        own.append((owner, name, getattr(owner, name)))
        setattr(owner, name, spy(name, answer))

def load(way):
    for owner, name, call in own:  # a worker may ask
        setattr(owner, name, call)
    before = set(sys.modules)
    threads = len(os.listdir("/proc/self/task"))
    if way == "official":
        program = torch.export.load(sys.argv[2]).module(check_guards=False)
    else:
        from blockflow.engine.lean import lean
        from blockflow.engine.program import read_program
        program = lean(read_program(open(sys.argv[2], "rb")))
    with torch.inference_mode():
        program(torch.zeros(2, 1, 8, 8))
    return [threads, sorted(set(sys.modules) - before), len(before)]

def loaded_in_a_fork(way):
    there, back = os.pipe()
    if os.fork() == 0:
        try:
            os.write(back, json.dumps(load(way)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(back)
    with open(there) as f:
        return json.load(f)

found = {"asked": asked}
preload(BASE_MODULES)
found["data"] = loaded_in_a_fork("data")
preload(modules_of([TORCH_EXPORT]))
found["official"] = loaded_in_a_fork("official")
preload(modules_of(LOADER_MODULES))
rehearse([[REHEARSAL, {"repository": sys.argv[1]}]])
assert "blockflow.tensormq.cuda_driver" not in sys.modules, "the driver's module is loaded"
assert not torch.cuda.is_initialized()
with open("/proc/self/maps") as maps:
    assert not any("libcuda.so" in line for line in maps) or torch.version.cuda, "libcuda is mapped"
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an interpreter that has done all of it found: its imports take six seconds."""
    folder = tmp_path_factory.mktemp("preloaded")
    blocks, artifact = echo_repository(folder / "blocks").root, folder / "net.pt2"
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    ).eval()
    rows = torch.export.Dim("rows", max=64)
    program = torch.export.export(net, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: rows},))
    torch.export.save(program, artifact)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(blocks), str(artifact)],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_preloading_and_rehearsing_leave_the_device_alone(preloaded: dict[str, Any]) -> None:
    assert preloaded["asked"] == []


def test_preload_leaves_nothing_to_import(preloaded: dict[str, Any]) -> None:
    """A load and a run import next to nothing after the preload, which has started no thread; and
    what is read as data does so without torch.export's modules."""
    sizes = []
    for way in ("data", "official"):
        threads, imported, size = preloaded[way]
        assert threads == 1
        assert len(imported) < 10, f"preload these too: {imported}"
        sizes.append(size)
    assert sizes[0] < sizes[1] - 500  # modules: torch.export brings a compiler


def test_children_ask_for_devices_without_initialising_the_driver() -> None:
    assert child_environment()["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert (
        child_environment(base={"PYTORCH_NVML_BASED_CUDA_CHECK": "0"})[
            "PYTORCH_NVML_BASED_CUDA_CHECK"
        ]
        == "0"
    )
