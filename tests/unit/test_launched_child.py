"""What a new process is told, and how its entry's end becomes its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import pytest

from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.launch import child
from blockflow.launch.child import Order, end, enter
from blockflow.wire.codec import encode

ENTRY = f"{__name__}:entry"


class Ended(BaseException):
    """Stands for the end of the process."""


def entry(spec: Mapping[str, Any]) -> int:
    if "raises" in spec:
        raise ENDS[spec["raises"]]
    return int(spec["returns"])


ENDS: list[BaseException] = [
    SystemExit(9),
    SystemExit("in words"),
    SystemExit(),
    ValueError("a defect"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize(
    ("spec", "status"),
    [({"returns": 3}, 3), *(({"raises": n}, s) for n, s in enumerate((9, 1, 1, 1, 1)))],
)
def test_how_an_entry_ends(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, Any], status: int
) -> None:
    ended: list[int] = []

    def stop(status: int) -> NoReturn:
        ended.append(status)
        raise Ended

    monkeypatch.setattr(child, "_prepare", lambda order, lifeline_fd: None)
    monkeypatch.setattr(child, "end", stop)
    with pytest.raises(Ended):
        enter(Order(ENTRY, spec, "w#0"), 3)
    assert ended == [status]


def test_who_cannot_be_prepared_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(order: Order, lifeline_fd: int) -> None:
        raise OSError

    ended: list[int] = []
    monkeypatch.setattr(child, "_prepare", fails)
    monkeypatch.setattr(child, "end", ended.append)
    enter(Order(ENTRY, {"returns": 3}, "w#0"), 3)
    assert ended == [1]


def test_who_is_on_its_cores_already_does_not_ask_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sandbox may refuse it, and by default all cores are meant."""

    def refused(pid: int, cores: set[int]) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_setaffinity", refused)
    child._pin(sorted(os.sched_getaffinity(0)))


def test_who_was_to_run_on_cores_that_are_gone_runs_on_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container's may be exchanged while it runs: nobody who dies could be replaced then."""

    def refuses(number: int) -> None:
        def set_affinity(pid: int, cores: set[int]) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "sched_setaffinity", set_affinity)

    refuses(errno.EINVAL)
    child._pin([4096])
    assert "cores [4096] are gone" in caplog.text
    refuses(errno.EPERM)
    with pytest.raises(SystemError_, match="not permitted"):
        child._pin([4096])


@pytest.mark.parametrize(("status", "code"), [(0, 0), (255, 255), (256 + 3, 3), (-1, 255)])
def test_a_status_has_eight_bits(monkeypatch: pytest.MonkeyPatch, status: int, code: int) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    end(status)
    assert codes == [code]


def test_an_order_comes_as_it_went() -> None:
    order = Order("a.b:c", {"cores": [1], "n": {"x": None}}, "w#0")
    assert Order.from_bytes(order.to_bytes()) == order


@pytest.mark.parametrize(
    "raw",
    [{}, [], ["a:b", {}], ["a:b", {}, "n", 1], ["a:b", [], "n"], [1, {}, "n"], ["ab", {}, "n"]],
)
def test_what_is_no_order_is_refused(raw: Any) -> None:
    with pytest.raises(BlockFlowError):
        Order.from_bytes(encode(raw))
