"""A Dispatcher that ends under a client's hands: the client goes on, and takes nothing along."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import zmq
from dispatcher_rig import wait_until
from fake_dispatcher import FakeDispatcher

from blockflow.client import Client
from blockflow.client.conduct import MOST_UNASKED
from blockflow.client.dealer import Dealer
from blockflow.wire.client import Reply, TaskResult, encode_to_client
from blockflow.wire.tensor import TensorDesc

X = np.ones((1, 4), np.float32)
ROUNDS = 5
BURST = MOST_UNASKED - 1
"""Replies in a row: the client looks at ZeroMQ's commands once in a hundred frames only. With more
of them it would hang up first."""

LOSER = """
import sys
import numpy as np
from blockflow.client import Client
from blockflow.client.dealer import Dealer
from blockflow.core.errors import BlockFlowError

with Client(sys.argv[1], shared_memory="off", connect_timeout_s=60) as client:
    for _ in range(int(sys.argv[2])):
        try:
            client.infer("t", np.ones((1, 4), np.float32), deadline_s=60)
        except BlockFlowError as e:
            print(e.code, flush=True)
"""


def burst_and_end(endpoint: str, rounds: int) -> None:
    """To the first who asks, replies that nobody waits for, as fast as can be, and the end."""
    tensor = TensorDesc("float32", (1, 4))
    context = zmq.Context()
    try:
        for _ in range(rounds):
            router = context.socket(zmq.ROUTER)
            router.set(zmq.SNDHWM, 0)
            router.set(zmq.RCVTIMEO, 60_000)
            router.bind(endpoint)
            who, *_ = router.recv_multipart()
            for _ in range(BURST):
                reply = Reply(secrets.token_bytes(16), 1, (TaskResult("t", tensor, None),))
                router.send_multipart([who, encode_to_client(reply), X.tobytes()])
            router.close(0)
    finally:
        context.destroy(0)


def test_an_end_amid_a_burst_of_replies_is_not_the_clients(tmp_path: Path) -> None:
    """ZeroMQ's own way of it, with IMMEDIATE, ends the process: Assertion failed: !_more."""
    endpoint = f"ipc://{tmp_path}/d.sock"
    server = threading.Thread(target=burst_and_end, args=(endpoint, ROUNDS))
    server.start()
    done = subprocess.run(
        [sys.executable, "-c", LOSER, endpoint, str(ROUNDS)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    server.join(60)
    assert not server.is_alive()
    lost = ["CONNECTION_LOST"] * ROUNDS
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, lost, "")


def test_what_had_not_left_is_not_for_the_next_dispatcher(tmp_path: Path) -> None:
    """Its sender has been told that it was lost, and may have sent it again under the same id."""
    endpoint = f"ipc://{tmp_path}/d.sock"
    big = np.ones((4096, 4), np.float32)
    context = zmq.Context()
    deaf = context.socket(zmq.ROUTER)
    deaf.set(zmq.RCVHWM, 1)
    deaf.bind(endpoint)
    try:
        with Client(endpoint, shared_memory="off", connect_timeout_s=60) as client:
            lost = [client.submit("echo", big, deadline_s=60) for _ in range(200)]
            wait_until(lambda: client.counters().message_uploads == len(lost))
            deaf.close(0)
            codes = {getattr(p.exception(60), "code", None) for p in lost}
            assert codes == {"CONNECTION_LOST"}
            with FakeDispatcher(endpoint, share=False) as fake:
                for _ in range(3):
                    assert np.array_equal(client.infer("echo", X, deadline_s=60).value, X)
                assert [r.tensor.dims for r in fake.requests] == [X.shape] * 3
    finally:
        context.destroy(0)


def test_it_connects_again_each_time(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/d.sock"
    with Client(endpoint, shared_memory="off", connect_timeout_s=60) as client:
        for count in range(1, 6):
            with FakeDispatcher(endpoint, share=False):
                assert np.array_equal(client.infer("echo", X, deadline_s=60).value, X)
                assert client.counters().connects == count
            wait_until(lambda n=count: client.counters().disconnects == n)


def test_an_attempt_that_nobody_answers_gives_way_to_the_next() -> None:
    """As while a network is silent. The kernel asks ever more seldom, for two minutes in all."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # what does not fit into its queue is dropped
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        context = zmq.Context()
        stack.callback(context.destroy, 0)
        dealer = Dealer(context, f"tcp://127.0.0.1:{full.getsockname()[1]}")
        stack.callback(dealer.close, 0)
        wait_until(lambda: zmq.EVENT_CONNECT_RETRIED in dict(dealer.events()), timeout_s=60)
