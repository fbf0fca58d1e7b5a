"""What requests in flight ask of idle cores, and that the kernel is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from latency_device import words

from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import TaskRoute
from blockflow.dispatcher.cpu_latency import CpuLatency
from blockflow.dispatcher.wakefulness import LINGER_NS, Wakefulness

SPEC = TensorSpec("float32", ("rows", 4))


def asks(latency_us: int | None) -> TaskRoute:
    return TaskRoute("t", ("b",), Contract(SPEC, SPEC), cpu_latency_us=latency_us)


def test_nothing_is_asked_for_by_tasks_that_ask_for_nothing() -> None:
    w = Wakefulness()
    w.enter(b"1", [asks(None)])
    assert (w.wanted_us(0), w.next_due()) == (None, None)
    w.leave(b"1", 5)
    assert (w.wanted_us(5), w.next_due()) == (None, None)


def test_it_is_asked_for_from_the_first_request_until_a_while_after_the_last() -> None:
    w = Wakefulness()
    w.enter(b"1", [asks(0)])
    w.enter(b"2", [asks(0)])
    w.leave(b"1", 100)
    assert (w.wanted_us(10**12), w.next_due()) == (0, None)  # the other one is in flight
    w.leave(b"2", 200)
    assert w.next_due() == 200 + LINGER_NS
    assert w.wanted_us(199 + LINGER_NS) == 0
    assert w.wanted_us(200 + LINGER_NS) is None
    assert w.next_due() is None


def test_who_comes_in_the_while_after_begins_anew() -> None:
    w = Wakefulness()
    w.enter(b"1", [asks(7)])
    w.leave(b"1", 0)
    w.enter(b"2", [asks(7)])
    assert (w.wanted_us(10 * LINGER_NS), w.next_due()) == (7, None)
    w.leave(b"2", 10 * LINGER_NS)
    assert w.wanted_us(11 * LINGER_NS - 1) == 7


def test_the_least_counts_of_a_request_and_of_all() -> None:
    w = Wakefulness()
    w.enter(b"1", [asks(50), asks(None), asks(20)])
    assert w.wanted_us(0) == 20
    w.enter(b"2", [asks(3)])
    assert w.wanted_us(0) == 3
    w.leave(b"2", 0)
    assert (w.wanted_us(0), w.wanted_us(LINGER_NS)) == (3, 20)


def test_who_is_sent_twice_counts_once_and_who_leaves_may_come_back() -> None:
    w = Wakefulness()
    w.enter(b"1", [asks(4)])
    w.enter(b"1", [asks(4)])
    w.leave(b"1", 0)
    assert (w.wanted_us(LINGER_NS - 1), w.wanted_us(LINGER_NS)) == (4, None)
    w.enter(b"1", [asks(4)])
    assert (w.wanted_us(2 * LINGER_NS), w.next_due()) == (4, None)


def test_a_request_that_never_came_leaves_nothing() -> None:
    w = Wakefulness()
    w.leave(b"unknown", 0)
    assert w.next_due() is None


def test_the_kernel_is_told_what_changes_and_nothing_twice(tmp_path: Path) -> None:
    device = tmp_path / "latency"
    device.touch()
    held = CpuLatency(device)
    for us in (None, 0, 0, 30, None, None, 0):
        held.hold(us)
    assert words(device) == [0, 30, -1, 0]
    assert held.gauges() == {"held_us": 0, "trouble": ""}
    held.close()
    held.close()
    assert held.held_us is None


def test_where_it_may_not_ask_all_goes_on_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = CpuLatency(tmp_path / "none")
    with caplog.at_level(logging.WARNING, "blockflow.dispatcher"):
        for _ in range(3):
            held.hold(0)
        held.retry()
        held.hold(0)
    (said,) = caplog.messages
    assert "cpu_latency_us" in said
    assert "none: No such file" in said
    assert (held.held_us, held.trouble) == (None, f"{tmp_path / 'none'}: No such file or directory")


def test_what_failed_is_tried_again_when_asked_to(tmp_path: Path) -> None:
    device = tmp_path / "latency"
    held = CpuLatency(device)
    held.hold(5)
    device.touch()
    held.hold(5)
    assert words(device) == []
    held.retry()
    held.hold(5)
    assert (words(device), held.trouble) == ([5], "")
    held.close()
