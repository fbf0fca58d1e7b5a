"""Who waits for something in the Manager's thread is told once: when it is true, or in time."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from blockflow.control.waiters import Waiter, Waiters, result_of
from blockflow.core.errors import SystemError_


def test_who_waits_is_told_once_and_no_later_than_asked() -> None:
    facts: dict[str, Any] = {}
    waiters, futures = Waiters(), dict[str, Future[Any]]()
    for name, deadline_ns in (("a", 10), ("b", 20), ("c", 30)):
        futures[name] = Future()
        waiters.add(Waiter(lambda name=name: facts.get(name), deadline_ns, futures[name]))
    assert sorted(waiters.deadlines()) == [10, 20, 30]
    facts["b"] = 0  # is something
    waiters.check(9)
    assert futures["b"].result(0) == 0 and not futures["a"].done()
    waiters.check(10)
    assert futures["a"].result(0) is None
    assert waiters.deadlines() == [30]
    waiters.dismiss()
    assert futures["c"].result(0) is None
    waiters.check(40)  # nobody is told twice, which would raise


def test_a_thread_that_is_busy_is_a_typed_error() -> None:
    with pytest.raises(SystemError_, match="TIMEOUT: the control plane is busy") as refused:
        result_of(Future[int](), 0)
    assert refused.value.retryable


def test_who_waits_for_what_is_a_defect_is_told_and_keeps_up_nobody() -> None:
    waiters, futures = Waiters(), [Future[Any](), Future[Any]()]
    tests: list[Any] = [{}.popitem, lambda: "found"]
    for test, future in zip(tests, futures, strict=True):
        waiters.add(Waiter(test, 10, future))
    waiters.check(0)
    assert isinstance(futures[0].exception(0), KeyError)
    assert futures[1].result(0) == "found"
    assert waiters.deadlines() == []
