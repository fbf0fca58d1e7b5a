"""A system on tcp with a proxy before the data socket of every process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_proxy import ByteProxy
from control_rig import echo_repository
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


@contextmanager
def linked(root: Path, body: dict[str, Any], launcher: Launcher) -> Iterator[Net]:
    """``body`` deployed on echo blocks; the Dispatcher listens on tcp as well."""
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
                served(root, body, launcher) as system,
                Client(system.client_endpoint, connect_timeout_s=LONG_S) as client,
            ):
                system.commands.monitor(50.0)
                net = Net(system, client, proxies)
                for task in body["tasks"]:
                    net.serves(task)
                yield net
        finally:
            for proxy in proxies.values():
                proxy.close()
