"""What tests of the client's protocol core share: a core, and what a Dispatcher says to it."""

from __future__ import annotations

from typing import Any

from blockflow.client.core import ClientCore
from blockflow.client.outcome import Outcome
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import TaskRoute
from blockflow.wire.client import (
    Description,
    Reply,
    TaskResult,
    decode_to_dispatcher,
    encode_to_client,
)
from blockflow.wire.tensor import TensorDesc

MS = 1_000_000
DESC = TensorDesc("float32", (1, 4))
SPEC = TensorSpec("float32", ("rows", 4))
BODY = memoryview(bytes(16))


class Phone:
    """A dealer, and whom it dials; its attempts come to nothing."""

    endpoint = ""

    def dial(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def hang_up(self) -> None:
        self.endpoint = ""


def rid(n: int) -> bytes:
    return n.to_bytes(16, "big")


def new_core(max_pending: int = 100) -> ClientCore:
    return ClientCore(
        "tcp://test:1", connect_timeout_ns=1000 * MS, max_pending=max_pending, now_ns=0
    )


def connected_core() -> ClientCore:
    core = new_core()
    core.on_connected()
    return core


def submit(core: ClientCore, n: int, now: int = 0, deadline_ms: int | None = 1000) -> None:
    core.submit(rid(n), ("t",), DESC, BODY, deadline_ms, now)


def send_all(core: ClientCore, now: int = 0) -> list[Any]:
    """What a socket that takes everything would have sent, decoded."""
    out = []
    while (message := core.next_message(now)) is not None:
        header, _, request_id = message
        core.sent(request_id)
        out.append(decode_to_dispatcher(header))
    return out


def reply(n: int, epoch: int = 1, **kw: Any) -> list[bytes]:
    result = TaskResult(kw.get("task", "t"), DESC, None)
    return [encode_to_client(Reply(rid(n), epoch, (result,))), bytes(16)]


def description(request_id: bytes, deadline_ms: int = 300, epoch: int = 1) -> list[bytes]:
    task = TaskRoute("t", ("b",), Contract(SPEC, SPEC), 32, deadline_ms)
    return [encode_to_client(Description(request_id, epoch, (task.to_dict(),), {}))]


def only(outcomes: list[Outcome]) -> Any:
    assert len(outcomes) == 1
    return outcomes[0]
