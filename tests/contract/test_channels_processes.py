"""The contract of channels once more, for device memory between two real processes: on the double
of the driver, and on a real device where there is one."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from blockflow.launch.base import Launcher
from blockflow.tensormq.cuda import CudaProducer
from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.janitor import RunDir
from tests import channel_rig
from tests.contract import test_channels_data, test_channels_leases
from tests.cuda_rig import FarConsumer, OtherEnd, double_folder, make_api, other_end

globals().update(
    {
        name: value
        for suite in (test_channels_data, test_channels_leases)
        for name, value in vars(suite).items()
        if name.startswith("test_") and "way" in inspect.signature(value).parameters
    }
)


@pytest.fixture(scope="module")
def end(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherEnd]:
    with other_end(launcher, tmp_path_factory.mktemp("end")) as made:
        yield made


@pytest.fixture(params=["double", pytest.param("driver", marks=pytest.mark.gpu)])
def way(request: pytest.FixtureRequest, end: OtherEnd) -> Iterator[channel_rig.Way]:
    with RunDir.create() as run_dir:
        double = double_folder(run_dir.path)
        where = str(double) if request.param == "double" else "driver"
        device = CudaDevice(make_api(where))

        def producer(path: Path, capacity: int, slots: int) -> CudaProducer:
            return CudaProducer(device, path, channel_rig.OWNER, capacity, slots)

        made = channel_rig.Way(run_dir.path, producer, partial(FarConsumer, end, where))
        yield made
        made.close()
        assert device.close()
        end.ask("forget", where)
        assert not (double / "broken").exists(), (double / "broken").read_text()
        shutil.rmtree(double)
