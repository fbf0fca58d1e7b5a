"""Handles that are lost on their way, by a reset or in silence: the slots come back.

Whoever the message was for lives on and was never told of the slot, so nobody will release it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dispatcher_rig import wait_until
from links_rig import SHORT_S, Net, X, linked

from blockflow.launch.base import Launcher

BODY = {"blocks": ["a", "b"], "tasks": {"t": ["a", "b"]}, "mode": "tensormq", "transport": "tcp"}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[Net]:
    with linked(tmp_path_factory.mktemp("handles"), BODY, launcher) as net:
        yield net


def slots(net: Net, name: str) -> tuple[int, int]:
    """Of a worker: how many are taken, and how many there are."""
    (figures,) = [w["process"] for w in net.system.commands.workers() if w["name"] == name]
    return figures["slots_used"], figures["slots"]


@pytest.mark.parametrize("link", ["b#0", "dispatcher"])
@pytest.mark.parametrize("reset", [False, True])
def test_as_many_as_there_are_slots(net: Net, link: str, reset: bool) -> None:
    proxy, owner = net.proxies[link], {"b#0": "a#0", "dispatcher": "b#0"}[link]
    before = {w["name"]: w["pid"] for w in net.system.commands.workers()}
    _, total = slots(net, owner)
    proxy.rule("up", hold=reset, lose=0 if reset else 1 << 30)
    while slots(net, owner)[0] < total:
        for future in [net.client.submit("t", X, deadline_s=SHORT_S) for _ in range(4)]:
            assert future.exception(10 * SHORT_S) is not None
    if reset:
        assert proxy.reset() > 0
    proxy.rule()
    wait_until(lambda: slots(net, owner)[0] == 0)
    net.comes_back()
    wait_until(net.idle)
    assert {w["name"]: w["pid"] for w in net.system.commands.workers()} == before
