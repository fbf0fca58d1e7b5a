"""Inferences under way: who is ordered and waited for when, in virtual time, on the CPU, and in the
places of torch's own calls for a device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from blockflow.bench.flight import Flight, rate_of
from blockflow.bench.in_process import Pipeline
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.engine.base import EngineOptions
from blockflow.engine.echo import EchoEngine

SPEC = TensorSpec("float32", ("rows", 4))


def engines(folder: Path, count: int = 2, settings: str = '{"add": 1}') -> list[EchoEngine]:
    artifact = folder / "artifact"
    artifact.write_text(settings)
    info = BlockInfo("echo", "1", "0" * 64, "echo", Contract(SPEC, SPEC), 0, 0)
    found = [EchoEngine(info, EngineOptions()) for _ in range(count)]
    for engine in found:
        engine.load(artifact)
    return found


# --- the count, in virtual time ------------------------------------------------------------------


class Device:
    """Computes what it is ordered, one after the other, ``busy_s`` each; ordering takes the host
    ``order_s``."""

    def __init__(self, busy_s: float, order_s: float) -> None:
        self.now = 0.0
        self.free_at = 0.0
        self.under_way = self.most = 0
        self._busy_s, self._order_s = busy_s, order_s

    def order(self) -> float:
        self.now += self._order_s
        self.free_at = max(self.free_at, self.now) + self._busy_s
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return self.free_at

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)
        self.under_way -= 1


class Fake:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._there = 0.0

    def order(self) -> None:
        self._there = self._device.order()

    def wait(self) -> None:
        self._device.wait(self._there)


def rate(device: Device, count: int, seconds: float = 10.0) -> float:
    return rate_of([Fake(device) for _ in range(count)], seconds, lambda: device.now)


@pytest.mark.parametrize(
    ("busy_s", "order_s", "count", "expected"),
    [
        (1.0, 0.3, 1, 1 / 1.3),  # one after the other: the device waits for the host
        (1.0, 0.3, 2, 1.0),
        (1.0, 0.3, 4, 1.0),  # nothing but the device
        (0.3, 1.0, 4, 1.0),  # nothing but the host
        (1.0, 0.0, 4, 1.0),
    ],
)
def test_the_rate_is_what_the_slower_of_host_and_device_can_do(
    busy_s: float, order_s: float, count: int, expected: float
) -> None:
    device = Device(busy_s, order_s)
    assert rate(device, count) == pytest.approx(expected)
    assert device.most == count
    assert device.under_way == 0, "somebody is still under way"


def test_neither_the_beginning_nor_the_end_counts() -> None:
    assert rate(Device(1.0, 0.0), 4, seconds=3.0) == pytest.approx(1.0)
    assert rate(Device(1.0, 0.0), 4, seconds=0.0) == pytest.approx(1.0)


# --- a flight on the CPU -------------------------------------------------------------------------


def test_on_the_cpu_a_flight_is_the_engines_in_turn(tmp_path: Path) -> None:
    x = torch.zeros(3, 4)
    flight = Flight(engines(tmp_path), x, "cpu")
    between = []
    flight.order(lambda: between.append(1))
    assert torch.equal(flight.wait(), x + 2)
    assert len(between) == 2
    assert flight.outs == [None, None]  # these engines copy


def test_outputs_have_their_places_where_an_engine_writes_there(tmp_path: Path) -> None:
    flight = Flight(engines(tmp_path, settings='{"still": true}'), torch.zeros(3, 4), "cpu")
    assert [out.shape for out in flight.outs if out is not None] == [(3, 4)] * 2
    flight.order()
    assert flight.wait() is flight.outs[-1]


def test_each_head_computes_what_the_last_engine_has_given(tmp_path: Path) -> None:
    x = torch.zeros(3, 4)
    heads = engines(tmp_path)
    (tmp_path / "trunk").mkdir()
    flight = Flight(engines(tmp_path / "trunk", 1, '{"add": 10}'), x, "cpu", heads)
    between = []
    flight.order(lambda: between.append(1))
    assert torch.equal(flight.wait(), x + 11), "not of one another"
    assert len(between) == 3 and len(flight.outs) == 3


def test_a_pipeline_measures_in_all_its_ways(tmp_path: Path) -> None:
    pipeline = Pipeline(engines(tmp_path))
    for rows in (2, 3, 2):
        assert len(pipeline.run(rows)) == 2
        assert pipeline.whole(rows) > 0 and pipeline.apart(rows) > 0
        assert pipeline.rate(rows, 0.0) > 0
    assert pipeline.rate(5, 0.0) > 0


# --- a flight on a device ------------------------------------------------------------------------


class Calls:
    """What is asked of torch's device, in order; tensors stay on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.stream: Any = None
        calls = self

        class Stream:
            def __init__(self, device: str) -> None:
                assert device == "cuda:0"

        class Event:
            def record(self) -> None:
                calls.log.append(f"record in {calls.current}")

            def synchronize(self) -> None:
                calls.log.append("wait for the event")

        @contextmanager
        def stream(given: Any) -> Any:
            self.stream, before = given, self.stream
            try:
                yield
            finally:
                self.stream = before

        real = torch.Tensor.copy_

        def to(tensor: torch.Tensor, device: str, non_blocking: bool = False) -> torch.Tensor:
            calls.log.append(f"there in {calls.current}, {non_blocking=}")
            return tensor.clone()

        def copy(tensor: torch.Tensor, other: torch.Tensor, non_blocking: bool = False) -> Any:
            calls.log.append(f"back in {calls.current}, {non_blocking=}")
            return real(tensor, other)

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            calls.log.append("pin")
            return tensor.clone()

        def forbidden(*_: Any) -> None:
            raise AssertionError("this waits for more than this flight")

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "synchronize", forbidden)
        monkeypatch.setattr(torch.Tensor, "cpu", forbidden)
        monkeypatch.setattr(torch.Tensor, "to", to)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)

    @property
    def current(self) -> str:
        return "its stream" if self.stream is not None else "the common stream"

    def flights(self, folder: Path, count: int) -> Sequence[Flight]:
        return [Flight(engines(folder), torch.zeros(1, 4), "cuda:0") for _ in range(count)]


def test_on_a_device_nothing_waits_but_for_its_own_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    (flight,) = calls.flights(tmp_path, 1)
    assert calls.log == ["pin", "pin"], "input and result lie in pinned memory"
    calls.log.clear()
    flight.order()
    assert calls.log == [
        "there in its stream, non_blocking=True",
        "back in its stream, non_blocking=True",
        "record in its stream",
    ]
    calls.log.clear()
    result = flight.wait()
    assert calls.log == ["wait for the event"]
    assert torch.equal(result, torch.full((1, 4), 2.0))
    flight.order()
    assert flight.wait() is result, "the next one comes back to the same place"


def test_on_a_device_several_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    pipeline = Pipeline(engines(tmp_path))
    pipeline._device = "cuda:0"
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert pipeline.rate(1, 0.0) > 0
    steps = [entry.split(" ")[0] for entry in calls.log]
    # Four have been there alone; then four are ordered before the first is waited for.
    joined = " ".join(s for s in steps if s in ("record", "wait"))
    assert joined.endswith("record record record record wait record wait wait wait wait")
