"""Which CUDA devices the control plane takes for present: by files, and as a bound from above."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from blockflow.control.engines import engine_check
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.specs import BlockSpec
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.cuda_here import DOUBLE_ENV, Devices, devices_here, has_mps

SPEC = TensorSpec("float32", ("rows", 2))
BLOCK = BlockInfo("b", "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, 0)
TWO = ("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm")
MIG = ("proc/driver/nvidia/capabilities/gpu0/mig/gi1",)


def machine(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).mkdir(parents=True)
    return root


def count(root: Path, driver: bool = True, **environment: str) -> int | None:
    found = devices_here(environment, root, lambda: driver)
    return None if found is None else found.count


@pytest.mark.parametrize(
    ("files", "driver", "devices"),
    [
        ((), False, 0),
        ((), True, None),  # not used since the machine started, or WSL
        (TWO, True, 2),
        (TWO[:1], True, 1),
        # the driver knows of more than it has made files for
        ((*TWO[:1], "proc/driver/nvidia/gpus/a", "proc/driver/nvidia/gpus/b"), True, 2),
        ((*TWO, *MIG), True, None),
    ],
)
def test_files_of_the_driver_are_counted(
    tmp_path: Path, files: tuple[str, ...], driver: bool, devices: int | None
) -> None:
    assert count(machine(tmp_path, *files), driver) == devices


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("", 0),
        ("-1", 0),
        ("1", 1),
        ("1,0", 2),
        ("0,2,1", 1),  # CUDA stops at what is not there
        ("GPU-0a, GPU-0b,GPU-0c", 3),  # whose they are only the driver knows
    ],
)
def test_only_visible_devices_count(tmp_path: Path, visible: str, devices: int) -> None:
    root = machine(tmp_path, *TWO)
    assert count(root, CUDA_VISIBLE_DEVICES=visible) == devices


def test_instances_of_a_divided_gpu_are_bounded_by_what_is_visible(tmp_path: Path) -> None:
    root = machine(tmp_path, *TWO[:1], *MIG)
    assert count(root, CUDA_VISIBLE_DEVICES="MIG-a,MIG-b") == 2


def test_what_is_missing_is_said_with_what_is_there() -> None:
    here = Devices(2, "this machine has")
    assert [here.missing(d) for d in ("cpu", "cuda:0", "cuda:1")] == ["", "", ""]
    assert here.missing("cuda:3") == "there is no cuda:3: this machine has cuda:0, cuda:1"
    assert Devices(0, "X leaves").missing("cuda:0") == "there is no cuda:0: X leaves no CUDA device"


def test_an_update_is_refused_at_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = engine_check(BlockRepository(tmp_path), set())

    def said(device: str) -> list[tuple[str, str, str]]:
        found = check(BlockSpec(name="b", device=device), BLOCK, "$")
        return [(p.path, p.message, p.hint) for p in found]

    monkeypatch.setenv(DOUBLE_ENV, str(tmp_path))
    assert said("cuda:1") == []
    ((path, message, hint),) = said("cuda:2")
    assert hint == "place the block on one of these, or on cpu"
    assert path == "$.device" and "UNSUPPORTED_ENGINE" in message and DOUBLE_ENV in message
    monkeypatch.delenv(DOUBLE_ENV)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ((path, message, hint),) = said("cuda:0")
    assert hint == "use cpu"
    assert path == "$.device" and "no CUDA device" in message
    assert said("cpu") == []


def test_the_multi_process_service_is_where_its_variable_says(tmp_path: Path) -> None:
    there = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    assert not has_mps(there)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "control"))
        daemon.listen()
        assert has_mps(there)
        daemon.settimeout(0)
        with pytest.raises(BlockingIOError):
            daemon.accept()  # whoever looks is no client
    assert (tmp_path / "control").is_socket() and not has_mps(there), "it was killed"
    assert not has_mps({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "elsewhere")})
