"""A network between the processes of a system that loses, holds, slices and resets.

Whole tensors on tcp, with a proxy before the data socket of every process: into the path, within
it, and back from it. Nobody sees that a message is lost there; its request must end by its deadline
and leave nothing, and the next one must be served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_proxy import ByteProxy
from control_rig import echo_repository
from dispatcher_rig import wait_until
from system_rig import served

from blockflow.client import Client, Result
from blockflow.control import crew
from blockflow.control.brain import Received
from blockflow.control.manager import Manager
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.launch.base import Launcher
from blockflow.wire.control import Ready

X = np.ones((4, 4), np.float32)
LONG_S = 60.0
SHORT_S = 0.4
BODY = {
    "blocks": ["a", "b", "c"],
    "tasks": {"t": ["a", "b"], "other": ["c"]},
    "mode": "zeromq",
    "transport": "tcp",
}
LINKS = ("a#0", "b#0", "dispatcher")
"""Of task ``t``: from the Dispatcher, between two workers, back to the Dispatcher."""


@dataclass
class Net:
    """A system whose processes reach each other through proxies, by the name of who listens."""

    system: System
    client: Client
    proxies: dict[str, ByteProxy] = field(default_factory=dict)

    def serves(self, task: str = "t") -> None:
        assert np.array_equal(self.client.infer(task, X, deadline_s=LONG_S).value, X)

    def comes_back(self) -> None:
        """Served again; what is sent on a connection whose end is not known yet is lost as well."""
        answer: Any = None
        while not isinstance(answer, Result):
            answer = self.client.infer("t", X, deadline_s=SHORT_S, errors="return")
            assert isinstance(answer, Result) or answer.code == "DEADLINE_EXCEEDED"

    def total(self, what: str) -> int:
        return sum(p.total(way, what) for p in self.proxies.values() for way in ("up", "down"))

    def idle(self) -> bool:
        """By the Dispatcher's own word. A sample may be older than the question."""
        kpi = self.system.manager.views().dispatcher()["kpi"]
        return kpi["inflight"] == 0 and kpi["inflight_bytes"] == 0

    def dropped(self) -> int:
        """Results of requests that the Dispatcher did not know any more."""
        return int(self.system.manager.views().dispatcher()["kpi"]["dropped"].get("unknown", 0))

    def ends(self, task: str, fault: ByteProxy, what: str) -> None:
        """Requests end by their deadline until one of them has met the fault.

        One that was late by itself, on a busy machine, has not, or meets it when it is over.
        """
        before = fault.total("up", what)
        while fault.total("up", what) == before:
            answer = self.client.infer(task, X, deadline_s=SHORT_S, errors="return")
            if isinstance(answer, BlockFlowError):
                assert answer.code == "DEADLINE_EXCEEDED"
            else:
                assert fault.total("up", what) > before


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[Net]:
    root: Path = tmp_path_factory.mktemp("links")
    echo_repository(root / "blocks")
    proxies: dict[str, ByteProxy] = {}
    received, launch = Manager._received, crew.dispatcher_launch

    def by_proxy(manager: Manager, event: Received) -> None:
        """What listens says where; the others are told of the proxy instead."""
        message = event.message
        if isinstance(message, Ready) and message.endpoint.startswith("tcp://"):
            life = manager.brain.crew.find(event.incarnation)
            assert life is not None
            proxy = proxies[life.name] = ByteProxy(message.endpoint)
            event = replace(event, message=replace(message, endpoint=proxy.endpoint))
        received(manager, event)

    def on_tcp(*args: Any) -> Any:
        return replace(launch(*args), transport="tcp")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manager, "_received", by_proxy)
        patch.setattr(crew, "dispatcher_launch", on_tcp)
        try:
            with (
                served(root, BODY, launcher) as system,
                Client(system.client_endpoint, connect_timeout_s=LONG_S) as client,
            ):
                system.commands.monitor(50.0)
                net = Net(system, client, proxies)
                assert set(proxies) == {"c#0", *LINKS}
                net.serves()
                net.serves("other")
                yield net
        finally:
            for proxy in proxies.values():
                proxy.close()


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
