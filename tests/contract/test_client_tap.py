"""What passes a client's socket can be watched, in both clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from client_faces import AsyncFace, SyncFace
from dispatcher_rig import wait_until
from fake_dispatcher import FakeDispatcher

from blockflow.wire.client import (
    Reply,
    decode_to_client,
    decode_to_dispatcher,
    encode_to_client,
)

X = np.ones((1, 4), np.float32)


class Tap:
    """Notes what passes, by kind and in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def connected(self) -> None:
        self.seen.append("connected")

    def disconnected(self) -> None:
        self.seen.append("disconnected")

    def sent(self, header: bytes) -> None:
        self.seen.append(type(decode_to_dispatcher(header)).__name__)

    def received(self, header: memoryview) -> None:
        self.seen.append(type(decode_to_client(header)).__name__)


@pytest.mark.parametrize("face", [SyncFace, AsyncFace], ids=["sync", "async"])
def test_a_tap_sees_every_header_also_those_that_nobody_waits_for(face: Any) -> None:
    tap = Tap()
    with FakeDispatcher(share=False) as fake:
        client = face(fake.endpoint, tap=tap)
        client.infer("echo", X, deadline_s=5.0)
        reply = Reply(fake.requests[0].request_id, 1, ())
        fake.send_raw([encode_to_client(reply)])  # a second one, which the client drops
        wait_until(lambda: tap.seen.count("Reply") == 2)
        client.infer("echo", X, deadline_s=5.0)
    wait_until(lambda: "disconnected" in tap.seen)
    kinds = [k for k in tap.seen if k not in ("Invite", "Invitation", "Describe", "Description")]
    exchange = ["Request", "Reply", "Reply", "Request", "Reply"]
    assert kinds == ["connected", *exchange, "disconnected"]
    assert client.counters().late_replies == 1
    client.close()
