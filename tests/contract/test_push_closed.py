"""Sending sockets that were closed while messages waited for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from blockflow.tensormq.push import PushCache


@pytest.mark.parametrize("how", ["drop", "retain", "close"])
def test_what_waited_for_a_closed_socket_waits_no_more(how: str, tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    push = PushCache(context, poller)
    endpoint = f"ipc://{tmp_path}/nobody"
    assert push.send(endpoint, [b"one"], tag=1) and push.pending() == 1
    closing = {
        "drop": lambda: push.drop(endpoint),
        "retain": lambda: push.retain(()),
        "close": push.close,
    }
    assert [m.tag for m in closing[how]()] == [1]
    assert push.pending() == 0 and push.sockets_waiting() == [] and poller.sockets == []
    assert push.flush() == 0
    context.destroy(0)
