"""Sockets: finite, never waiting, never losing in silence; over ipc and tcp alike."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sockets_rig
import zmq
from sockets_rig import TIMEOUT_S, receive, until

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError, SystemError_
from blockflow.tensormq import sockets
from blockflow.tensormq.inline import InlineProducer, open_frame
from blockflow.tensormq.push import PushCache, Unsent
from blockflow.tensormq.sockets import bind_pull, bind_router, connect_dealer, new_context

_NEW_NET = 0x40000000
run_dir, ctx, transport = sockets_rig.run_dir, sockets_rig.ctx, sockets_rig.transport


@pytest.fixture
def push(ctx: zmq.Context[zmq.Socket[bytes]]) -> Iterator[PushCache]:
    made = PushCache(ctx, zmq.Poller())
    yield made
    made.close()


def test_options_are_finite(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, transport: str
) -> None:
    pull, endpoint = bind_pull(ctx, transport, run_dir, 1)
    push = sockets.connect_push(ctx, endpoint)
    router, _ = bind_router(ctx, [f"ipc://{run_dir}/r.sock"], max_bytes=limits.MAX_CONTROL_BYTES)
    dealer = connect_dealer(ctx, endpoint, "7")
    for sock in (pull, push, router, dealer):
        assert 0 < sock.get(zmq.SNDHWM) <= 1000
        assert 0 <= sock.get(zmq.LINGER) <= 1000
        assert sock.get(zmq.SNDTIMEO) == 0
    assert push.get(zmq.IMMEDIATE) == 1
    assert pull.get(zmq.MAXMSGSIZE) == limits.MAX_MESSAGE_BYTES + sockets.CURVE_BYTES
    assert router.get(zmq.MAXMSGSIZE) == limits.MAX_CONTROL_BYTES + sockets.CURVE_BYTES
    assert dealer.get(zmq.IDENTITY) == b"7"
    for sock in (pull, push):
        assert (sock.get(zmq.HEARTBEAT_IVL) > 0) == (transport == "tcp")
        # zeromq/libzmq#4364: the two together can end this process.
        assert (sock.get(zmq.RCVHWM) == 0) == (transport == "tcp")
        assert sock.get(zmq.RCVHWM) <= 1000
    assert 0 < router.get(zmq.RCVHWM) <= 1000


def test_endpoints(ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path) -> None:
    _, ipc = bind_pull(ctx, "ipc", run_dir, 12)
    assert ipc == f"ipc://{run_dir}/d12.sock"
    _, tcp = bind_pull(ctx, "tcp", run_dir, 12)
    host, _, port = tcp.removeprefix("tcp://").partition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    _, bound = bind_router(ctx, ["tcp://127.0.0.1:0", f"ipc://{run_dir}/c.sock"])
    assert int(bound[0].rpartition(":")[2]) > 0
    assert bound[1] == f"ipc://{run_dir}/c.sock"


def test_an_unknown_transport_is_refused(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path
) -> None:
    with pytest.raises(RequestError):
        bind_pull(ctx, "carrier-pigeon", run_dir, 1)


def test_a_taken_address_is_port_in_use(ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SystemError_) as info:
            bind_router(ctx, [endpoint])
        assert info.value.code == "PORT_IN_USE"
        assert info.value.where == endpoint
        with pytest.raises(SystemError_):
            bind_router(ctx, [endpoint, f"ipc://{run_dir}/c.sock"])
        assert not (run_dir / "c.sock").exists()  # nothing is left of the others
    ipc = f"ipc://{run_dir}/live.sock"
    first, _ = bind_router(ctx, [ipc])
    with pytest.raises(SystemError_) as info:
        bind_router(ctx, [ipc])
    assert info.value.code == "PORT_IN_USE"
    dealer = connect_dealer(ctx, ipc)
    dealer.send(b"still there")
    assert receive(first)[1] == b"still there"


def test_a_machine_without_a_free_port_has_no_room(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path
) -> None:
    """So a worker that dies meanwhile is tried again, and its block not given up."""

    def bind() -> str:
        try:
            return bind_pull(ctx, "tcp", run_dir, 1)[1]
        except SystemError_ as e:
            return e.code

    def with_two_ports() -> tuple[str, ...]:
        """In a network namespace of this thread's own."""
        if ctypes.CDLL(None).unshare(_NEW_NET):
            return ("refused",)
        Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("61000 61001\n")
        with socket.socket() as one, socket.socket() as other:
            for taken in (one, other):
                taken.bind(("127.0.0.1", 0))
                taken.listen()
            without = bind()
        return without, bind().partition("61")[0]

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(with_two_ports).result(TIMEOUT_S)
    if found == ("refused",):
        pytest.skip("no network namespace may be made here")
    assert found == ("NO_SPACE", "tcp://127.0.0.1:")


def test_a_stale_socket_file_is_replaced_and_another_file_is_not(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path
) -> None:
    stale = run_dir / "stale.sock"
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(stale))
    assert stale.exists()
    router, _ = bind_router(ctx, [f"ipc://{stale}"])
    dealer = connect_dealer(ctx, f"ipc://{stale}")
    dealer.send(b"x")
    assert receive(router)[1] == b"x"
    precious = run_dir / "precious"
    precious.write_text("data")
    with pytest.raises(SystemError_):
        bind_router(ctx, [f"ipc://{precious}"])
    assert precious.read_text() == "data"


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://192.0.2.1:0",
        "tcp://127.0.0.1:99999",
        "nonsense",
        "udp://x",
        "tcp://",
        "ipc://" + "x" * 120,
        "ipc:///etc/passwd/x",
        "ipc:///proc/self/nobody/x",
    ],
)
def test_bad_addresses_are_typed_errors(ctx: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
    with pytest.raises(BlockFlowError) as info:
        bind_router(ctx, [endpoint])
    assert info.value.code == "INVALID_REQUEST"


def test_a_bad_endpoint_to_send_to_is_a_typed_error(push: PushCache) -> None:
    with pytest.raises(RequestError):
        push.send("nonsense", [b"x"])
    assert push.endpoints() == []


def test_an_old_libzmq_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 2))
    with pytest.raises(SystemError_, match="older"):
        new_context()


def test_router_tells_when_a_peer_is_not_there(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path
) -> None:
    router, _ = bind_router(ctx, [f"ipc://{run_dir}/r.sock"])
    with pytest.raises(zmq.ZMQError) as info:
        router.send_multipart([b"nobody", b"x"])
    assert info.value.errno == zmq.EHOSTUNREACH


def test_an_oversized_message_closes_its_connection_and_no_other(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, transport: str
) -> None:
    address = "tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{run_dir}/r.sock"
    router, (endpoint,) = bind_router(ctx, [address], max_bytes=8192)
    good, bad = connect_dealer(ctx, endpoint, "good"), connect_dealer(ctx, endpoint, "bad")
    bad.send(bytes(8193 + sockets.CURVE_BYTES))
    good.send(bytes(8192))
    assert receive(router) == [b"good", bytes(8192)]
    good.send(b"again")
    assert receive(router) == [b"good", b"again"]


def test_dealers_messages_wait_for_the_router(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path
) -> None:
    dealer = connect_dealer(ctx, f"ipc://{run_dir}/late.sock", "41")
    dealer.send(b"hello")
    router, _ = bind_router(ctx, [f"ipc://{run_dir}/late.sock"])
    assert receive(router) == [b"41", b"hello"]


# --- PushCache ------------------------------------------------------------------------------------


def test_messages_before_the_connection_stands_arrive_in_order(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, transport: str, push: PushCache
) -> None:
    pull, endpoint = bind_pull(ctx, transport, run_dir, 1)
    for i in range(50):
        assert push.send(endpoint, [str(i).encode(), b"frame"])
    got = [receive(pull, push) for _ in range(50)]
    assert got == [[str(i).encode(), b"frame"] for i in range(50)]
    assert push.pending() == 0
    assert push.sockets_waiting() == []


def test_what_waits_keeps_its_place_before_what_comes_later(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, push: PushCache
) -> None:
    endpoint = f"ipc://{run_dir}/d5.sock"
    assert push.send(endpoint, [b"first"])
    pull, _ = bind_pull(ctx, "ipc", run_dir, 5)
    (sock,) = push.sockets_waiting()
    until(lambda: bool(sock.poll(0, zmq.POLLOUT)), "the connection")
    assert push.send(endpoint, [b"second"])
    assert push.pending() == 2, "the socket is writable, but the first has not been flushed"
    assert push.flush() == 2
    assert [receive(pull), receive(pull)] == [[b"first"], [b"second"]]


def test_a_poller_wakes_the_loop_when_the_peer_comes_up(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path
) -> None:
    poller = zmq.Poller()
    push = PushCache(ctx, poller)
    push.send(f"ipc://{run_dir}/d1.sock", [b"x"])
    assert len(poller.sockets) == push.pending() == 1
    assert poller.poll(20) == [], "nobody is there: the loop must sleep, not spin"
    pull, _ = bind_pull(ctx, "ipc", run_dir, 1)
    assert poller.poll(TIMEOUT_S * 1000)
    assert push.flush() == 1
    assert poller.sockets == []
    assert receive(pull) == [b"x"]
    push.close()


def test_a_full_queue_refuses_and_never_waits(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path
) -> None:
    push = PushCache(ctx, zmq.Poller(), max_pending=3)
    endpoint = f"ipc://{run_dir}/nobody.sock"
    taken = [push.send(endpoint, [bytes([i])], tag=i) for i in range(5)]
    assert taken == [True, True, True, False, False]
    assert push.flush() == 0
    assert push.pending() == 3
    other, there = bind_pull(ctx, "ipc", run_dir, 9)
    push.send(there, [b"other endpoints are not held up"])
    assert receive(other, push)
    unsent = push.drop(endpoint)
    assert unsent == [Unsent(endpoint, [bytes([i])], i) for i in range(3)]
    assert push.drop(endpoint) == []
    push.close()


def test_a_slow_receiver_fills_the_queue_and_loses_nothing(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path
) -> None:
    push = PushCache(ctx, zmq.Poller(), max_pending=8, hwm=2)
    pull, endpoint = bind_pull(ctx, "ipc", run_dir, 1, hwm=2)
    frame = bytes(1 << 20)  # larger than what the kernel's socket buffers swallow
    accepted = 0
    refused = 0
    deadline = time.monotonic() + TIMEOUT_S
    while refused < 20 and time.monotonic() < deadline:
        if push.send(endpoint, [str(accepted).encode(), frame]):
            accepted += 1
        else:
            refused += 1
            push.flush()
    assert refused >= 20, "the queues are bounded"
    got = [int(receive(pull, push)[0]) for _ in range(accepted)]
    assert got == list(range(accepted))
    push.close()


def test_retain_prunes_and_reports(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, push: PushCache
) -> None:
    kept, gone, up = (f"ipc://{run_dir}/{n}.sock" for n in ("kept", "gone", "up"))
    router, _ = bind_router(ctx, [up])  # any listener will do
    for endpoint in (kept, gone, up):
        push.send(endpoint, [b"x"], tag=endpoint)
    assert push.endpoints() == [kept, gone, up]
    assert {u.tag for u in push.retain([kept])} >= {gone}
    assert push.endpoints() == [kept]
    assert [u.tag for u in push.close()] == [kept]
    assert push.close() == []
    router.close(0)


def test_what_was_accepted_is_delivered_after_close(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, transport: str, push: PushCache
) -> None:
    pull, endpoint = bind_pull(ctx, transport, run_dir, 1)
    push.send(endpoint, [b"0"])
    assert receive(pull, push) == [b"0"]
    for i in range(20):
        push.send(endpoint, [str(i).encode()])
    assert push.close() == []
    assert [receive(pull) for _ in range(20)] == [[str(i).encode()] for i in range(20)]


def test_a_restarted_peer_is_found_again(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, push: PushCache
) -> None:
    pull, endpoint = bind_pull(ctx, "ipc", run_dir, 1)
    push.send(endpoint, [b"a"])
    assert receive(pull, push) == [b"a"]
    pull.close(0)

    def refused() -> bool:
        push.send(endpoint, [b"b"])
        return push.pending() > 0

    until(refused, "the loss to be noticed")
    reborn: list[zmq.Socket[bytes]] = []

    def bound() -> bool:
        with contextlib.suppress(SystemError_):  # the old listener is closed by the I/O thread
            reborn.append(bind_pull(ctx, "ipc", run_dir, 1)[0])
        return bool(reborn)

    until(bound, "the address")
    assert receive(reborn[0], push) == [b"b"]


def test_whole_tensors_travel_without_a_copy_at_the_sender(
    ctx: zmq.Context[zmq.Socket[bytes]], run_dir: Path, transport: str, push: PushCache
) -> None:
    producer = InlineProducer(max_buffers=2)
    pull, endpoint = bind_pull(ctx, transport, run_dir, 1)
    for i in range(20):  # far more than max_buffers: each is free again once it has been sent
        buffer = producer.reserve("uint8", (1 << 20,))
        while buffer is None:
            buffer = producer.reserve("uint8", (1 << 20,))
        buffer.memory[:] = bytes([i]) * (1 << 20)
        (payload,) = producer.publish(buffer, [21])
        assert push.send(endpoint, [b"header", payload.frame])
        del buffer
        desc = payload.desc
        del payload
        until(lambda: bool(push.flush() or pull.poll(1)), "the tensor")
        _, frame = pull.recv_multipart(copy=False)
        got = open_frame(desc, frame)
        assert bytes(got.memory[:3]) == bytes([i]) * 3
        got.release()
        del frame
    until(lambda: producer.outstanding() == 0, "the sender's buffers")
