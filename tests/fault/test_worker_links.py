"""A network between the processes of a system that loses, holds, slices and resets.

Whole tensors on tcp, with a proxy before the data socket of every process: into the path, within
it, and back from it. Nobody sees that a message is lost there; its request must end by its deadline
and leave nothing, and the next one must be served. With handles on tcp, their slots must come back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dispatcher_rig import wait_until
from links_rig import LONG_S, Net, X, linked

from blockflow.launch.base import Launcher

BODY = {
    "blocks": ["a", "b", "c"],
    "tasks": {"t": ["a", "b"], "other": ["c"]},
    "mode": "zeromq",
    "transport": "tcp",
}
LINKS = ("a#0", "b#0", "dispatcher")
"""Of task ``t``: from the Dispatcher, between two workers, back to the Dispatcher."""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[Net]:
    with linked(tmp_path_factory.mktemp("links"), BODY, launcher) as net:
        assert set(net.proxies) == {"c#0", *LINKS}
        yield net


@pytest.fixture(autouse=True)
def well_again(net: Net) -> Iterator[None]:
    """After each fault all is served by the processes that were there, and nothing is held."""
    before = {w["name"]: w["pid"] for w in net.system.commands.workers()}
    yield
    for proxy in net.proxies.values():
        proxy.rule()
    net.comes_back()
    for _ in range(10):
        net.serves()
    net.serves("other")
    wait_until(net.idle)
    assert {w["name"]: w["pid"] for w in net.system.commands.workers()} == before
    counters = net.client.counters()
    assert counters.submitted == counters.answered + counters.failed


def test_bytes_that_come_one_by_one(net: Net) -> None:
    for proxy in net.proxies.values():
        proxy.rule(slice_bytes=1)
    writes, lost, held = (net.total(what) for what in ("writes", "lost", "held"))
    for _ in range(3):
        net.serves()
    assert net.total("writes") - writes > 3 * len(LINKS) * X.nbytes
    wait_until(lambda: (net.total("lost"), net.total("held")) == (lost, held))


@pytest.mark.parametrize("link", LINKS)
def test_a_lost_message_ends_its_request_by_the_deadline(net: Net, link: str) -> None:
    proxy = net.proxies[link]
    proxy.rule("up", lose=1)
    net.ends("t", proxy, "lost_messages")
    assert proxy.total("up", "lost_messages") >= 1


@pytest.mark.parametrize("link", LINKS)
def test_a_reset_loses_what_is_under_way_and_no_more(net: Net, link: str) -> None:
    proxy = net.proxies[link]
    proxy.rule("up", hold=True)
    net.ends("t", proxy, "messages")
    held, before = proxy.total("up", "held"), proxy.connections
    assert held > 0
    assert proxy.reset() > 0
    proxy.rule()
    net.comes_back()
    assert proxy.total("up", "held") >= held
    assert proxy.connections > before


@pytest.mark.parametrize("link", LINKS)
def test_a_stall_is_waited_for_within_the_deadline(net: Net, link: str) -> None:
    """And holds up nobody else, but at the socket that everybody's results come to."""
    proxy = net.proxies[link]
    proxy.rule(hold=True)
    before = proxy.total("up", "messages")
    future = net.client.submit("t", X, deadline_s=LONG_S)
    wait_until(lambda: proxy.total("up", "messages") > before)
    if link != "dispatcher":
        net.serves("other")
    assert not future.done()
    proxy.rule()
    assert np.array_equal(future.result(LONG_S).value, X)


def test_a_result_that_comes_after_the_deadline_is_dropped(net: Net) -> None:
    proxy = net.proxies["dispatcher"]
    proxy.rule("up", hold=True)
    net.ends("t", proxy, "messages")
    dropped = net.dropped()
    proxy.rule()
    net.serves()
    wait_until(lambda: net.dropped() > dropped)


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_partition_in_one_direction_between_two_workers(net: Net, way: Any) -> None:
    proxy = net.proxies["b#0"]
    proxy.rule(way, swallow=True)
    if way == "up":
        for _ in range(2):
            net.ends("t", proxy, "lost_messages")
        net.serves("other")
        assert proxy.total("up", "lost") > 0
    else:  # tensors go the other way; what is missed is the heartbeat
        net.serves()
