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
