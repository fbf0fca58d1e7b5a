"""The client as a process sees it: imports, forks, forgotten clients, threads, descriptors."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from dispatcher_rig import wait_until
from fake_dispatcher import FakeDispatcher
from warm_rig import Warm

from blockflow.client import AsyncClient, Client
from blockflow.core.errors import RequestError

X = np.ones((1, 4), np.float32)
HEAVY = {"torch", "pydantic", "cherrypy", "psutil", "rich", "typer", "matplotlib", "sklearn"}


CODES = (
    "import blockflow",
    "import blockflow.client",
    "from blockflow.client import Client, AsyncClient, TaskGenerator, Collector",
    "Client('ipc:///nonexistent').close()",
)


def result_of(
    start: Callable[..., subprocess.Popen[Any]], code: str, *arguments: str
) -> tuple[int, str, str]:
    """The end of a Python program, its output and its errors."""
    words = [sys.executable, "-c", code, *arguments]
    child = start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = child.communicate(timeout=60)
    finally:
        child.kill()
        child.communicate()
    return child.returncode, output, errors


def test_the_sdk_imports_nothing_heavy() -> None:
    """Looked at after each line of a program."""
    look = "print(json.dumps(sorted(sys.modules)))"
    code = "\n".join(["import json, sys", *(f"{line}; {look}" for line in CODES)])
    status, output, errors = result_of(subprocess.Popen, code)
    assert status == 0, errors
    for line, shown in zip(CODES, output.splitlines(), strict=True):
        loaded = {name.partition(".")[0] for name in json.loads(shown)}
        assert not loaded & HEAVY
        assert ("numpy" in loaded) == ("close" in line), "a connection loads numpy, nobody before"


def test_names_are_found_and_others_are_not() -> None:
    import blockflow
    import blockflow.client as sdk

    for module in (blockflow, sdk):
        for name in module.__all__:
            assert getattr(module, name) is not None
            assert name in dir(module)
        with pytest.raises(AttributeError):
            _ = module.nonsense


def test_a_dispatcher_at_an_ipv6_address_is_reached() -> None:
    try:
        fake = FakeDispatcher("tcp://[::1]:*")
    except zmq.ZMQError:
        pytest.skip("no IPv6 on this machine")
    with fake, Client(fake.endpoint, connect_timeout_s=10) as client:
        assert fake.endpoint.startswith("tcp://[::1]:")
        assert np.array_equal(client.infer("echo", X).value, X)


def test_a_client_does_not_cross_a_fork() -> None:
    with FakeDispatcher() as fake, Client(fake.endpoint) as client:
        client.infer("echo", X)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:  # only plain calls in the child, and no return into the test runner
            try:
                client.infer("echo", X)
                answer = b"no error"
            except RequestError as exc:
                answer = exc.code.encode()
            client.close()
            os.write(write, answer)
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 100) == b"INVALID_REQUEST"
        os.close(read)
        os.close(write)
        # The parent's client is as it was.
        assert np.array_equal(client.infer("echo", X).value, X)


def test_a_forked_child_closes_and_waits_for_nothing() -> None:
    """The future of a thread that the child does not have would never be done."""
    with FakeDispatcher() as fake:
        client = AsyncClient(fake.endpoint)
        asyncio.run(client.infer("echo", X))
        held = client.submit("held", X)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:  # as above
            answer = b""
            try:
                with suppress(TimeoutError):
                    held.result(5)
            except RequestError as exc:
                answer = exc.code.encode()
            try:
                held.cancel()
            except RequestError:
                answer += b" kept"
            try:
                asyncio.run(asyncio.wait_for(client.close(), 5))
                answer += b" closed"
            finally:
                os.write(write, answer or b"nothing")
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 100) == b"INVALID_REQUEST kept closed"
        os.close(read)
        os.close(write)
        fake.release()
        assert np.array_equal(held.result(5).value, X)
        asyncio.run(client.close())


def test_a_program_that_forgets_to_close_ends() -> None:
    with FakeDispatcher() as fake:
        code = (
            "import numpy as np\nfrom blockflow.client import Client\n"
            f"c = Client({fake.endpoint!r})\n"
            "print(c.infer('echo', np.ones((1, 4), np.float32)).value.sum())\n"
            "c.submit('silent', np.ones((1, 4), np.float32))\n"
        )
        status, output, errors = result_of(subprocess.Popen, code)
    assert (status, output.strip(), errors) == (0, "4.0", "")


def test_at_the_exit_no_array_is_forgotten_while_it_is_being_sent() -> None:
    """ZeroMQ sends large ones from where they lie; pyzmq, which keeps them, ends then, too."""
    with FakeDispatcher() as fake:
        code = (
            "import threading, weakref\nimport numpy as np\nfrom blockflow.client import Client\n"
            "weakref.finalize(threading.current_thread(), print)\n"  # others have some, before
            f"c = Client({fake.endpoint!r}, shared_memory='off')\n"
            "c.infer('echo', np.ones((1, 1 << 17), np.float32))\n"
            "from zmq.utils.garbage import gc\n"
            "assert gc.is_alive()\n"
            "names = lambda: [t.name for t in threading.enumerate()]\n"
            "gc.stop = lambda: print('blockflow-client' in names())\n"
        )
        status, output, errors = result_of(subprocess.Popen, code)
    assert (status, output.split(), errors) == (0, ["False"], "")


def test_a_forgotten_client_is_collected_with_its_thread() -> None:
    with FakeDispatcher() as fake:
        client: Any = Client(fake.endpoint)
        client.infer("echo", X)
        thread = next(t for t in threading.enumerate() if t.name == "blockflow-client")
        del client
        gc.collect()
        thread.join(5)
        assert not thread.is_alive()


def test_a_client_that_its_thread_forgot_leaves_no_dummy_of_it() -> None:
    """As a pool's threads have one each, which goes when they have ended."""
    own = threading.local()
    with FakeDispatcher() as fake:

        def work() -> None:
            own.client = Client(fake.endpoint)
            own.client.infer("echo", X)

        before = set(threading.enumerate())
        threads = [threading.Thread(target=work) for _ in range(2)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(5)
        wait_until(lambda: set(threading.enumerate()) <= before)


def test_clients_leave_no_threads_and_no_descriptors() -> None:
    me = psutil.Process()

    def there() -> tuple[int, int, int]:
        return me.num_fds(), threading.active_count(), me.num_threads()

    with FakeDispatcher() as fake:
        with Client(fake.endpoint) as client:
            client.infer("echo", X)
        gc.collect()
        before = there()
        for _ in range(10):
            with Client(fake.endpoint) as client:
                client.infer("echo", X)
        gc.collect()
        wait_until(lambda: there() <= before)  # the other end closes when it comes to it


async def test_whoever_gives_up_waiting_for_the_end_does_not_disturb_it() -> None:
    with FakeDispatcher() as fake:
        client = AsyncClient(fake.endpoint)
        await client.infer("echo", X)
        thread = next(t for t in threading.enumerate() if t.name == "blockflow-client")
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)  # until it waits
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await client.close()
        assert not thread.is_alive()


@pytest.mark.parametrize("during", ["c.submit('echo', X)", "c.close()"])
@pytest.mark.parametrize("call", ["c.close()", "first.cancel()", "c.submit('echo', X)"])
def test_a_signals_handler_may_use_the_client(warm: Warm, during: str, call: str) -> None:
    """It comes in the middle of a call of the same thread: here while that wakes the client's."""
    with FakeDispatcher() as fake:
        code = (
            "import signal\nimport numpy as np\nfrom blockflow.client import Client\n"
            "from blockflow.core.errors import BlockFlowError\n"
            "X = np.ones((1, 4), np.float32)\n"
            f"c = Client({fake.endpoint!r})\n"
            "first = c.submit('silent', X)\n"
            "bell = c._connection._io._wakeup\n"
            "ring = bell.ring\n"
            "def handler(*_):\n"
            "    bell.ring = ring\n"
            "    try:\n"
            f"        {call}\n"
            "    except BlockFlowError as error:\n"
            "        print(error.code)\n"
            "    print('handled')\n"
            "signal.signal(signal.SIGUSR1, handler)\n"
            "bell.ring = lambda: (signal.raise_signal(signal.SIGUSR1), ring())\n"
            f"{during}\n"
            "c.close()\n"
            "print('closed')\n"
        )
        _, output, errors = result_of(warm.popen, code)
    refused = ["CANCELLED"] if "close" in during and "submit" in call else []
    assert (output.split(), errors) == ([*refused, "handled", "closed"], "")


@pytest.mark.parametrize(
    "during",
    [
        "first.done()",
        "first.add_done_callback(id)",
        "first.cancelled()",
        "wait([first], 0.01)",
        "first.exception(0.01)",
        "collector.records()",
    ],
)
def test_a_signals_handler_may_close_the_client_at_any_moment(warm: Warm, during: str) -> None:
    """Here while its thread has the lock of a request, which the client's thread is to end, or
    looks at records, to which the client's is to add one."""
    with FakeDispatcher() as fake:
        code = (
            "import signal\nimport numpy as np\nfrom blockflow.client import Client, Collector\n"
            "from concurrent.futures import TimeoutError, wait\n"
            f"c = Client({fake.endpoint!r})\n"
            "first = c.submit('silent', np.ones((1, 4), np.float32), deadline_s=60)\n"
            "collector = Collector()\n"
            "first.add_done_callback(collector.add)\n"
            "class Records(list):\n"
            "    def __iter__(self):\n"
            "        signal.raise_signal(signal.SIGUSR1)\n"
            "        return super().__iter__()\n"
            "collector._records = Records()\n"
            "class Interrupted:\n"
            "    def __init__(self, real):\n        self.real = real\n"
            "    def __getattr__(self, name):\n        return getattr(self.real, name)\n"
            "    def acquire(self):\n"
            "        self.real.acquire()\n"
            "        signal.raise_signal(signal.SIGUSR1)\n"
            "    def __enter__(self):\n        self.acquire()\n"
            "    def __exit__(self, *_):\n        self.real.release()\n"
            "real = first._condition\n"
            "def handler(*_):\n"
            "    first._condition = real\n"
            "    c.close()\n"
            "    print('handled')\n"
            "signal.signal(signal.SIGUSR1, handler)\n"
            "first._condition = Interrupted(real)\n"
            f"try:\n    {during}\nexcept TimeoutError:\n    pass\n"
            "print(first.exception().code, flush=True)\n"
        )
        _, output, errors = result_of(warm.popen, code)
    assert errors == ""
    assert {"handled", "CANCELLED"} <= set(output.split())


def test_a_signals_handler_may_close_the_client_at_any_line_of_a_generator(warm: Warm) -> None:
    """At none of them may it have what its callbacks, in the client's thread, wait for."""
    with FakeDispatcher(share=False) as fake:
        code = (
            "import signal, sys\nimport numpy as np\n"
            "from blockflow.client import Client, TaskGenerator\n"
            "from blockflow.client import generator\n"
            "def lines(n):\n"
            "    client, seen = Client(FAKE), 0\n"
            "    def trace(frame, event, _):\n"
            "        nonlocal seen\n"
            "        if frame.f_code.co_filename != generator.__file__:\n"
            "            return None\n"
            "        seen += event == 'line'\n"
            "        if seen == n:\n"
            "            sys.settrace(None)\n"
            "            signal.raise_signal(signal.SIGUSR1)\n"
            "        return trace\n"
            "    signal.signal(signal.SIGUSR1, lambda *_: client.close())\n"
            "    x = [np.ones((1, 4), np.float32)]\n"
            "    kw = {'mode': 'poisson', 'rate': 1e5, 'count': 2, 'deadline_s': 0.2}\n"
            "    load = TaskGenerator(client, 'silent', x, **kw)\n"
            "    sys.settrace(trace)\n"
            "    load.run()\n"
            "    sys.settrace(None)\n"
            "    client.close()\n"
            "    return seen\n"
            "n = 1\n"
            "while lines(n) == n:\n    n += 1\n"
            "print('lines', n)\n"
        ).replace("FAKE", repr(fake.endpoint))
        _, output, errors = result_of(warm.popen, code)
    assert errors == ""
    assert int(output.split()[1]) > 20


def test_ctrl_c_in_infer_cancels_the_request() -> None:
    with FakeDispatcher() as fake:
        code = (
            "import numpy as np, sys\nfrom blockflow.client import Client\n"
            f"c = Client({fake.endpoint!r})\n"
            "try:\n    c.infer('silent', np.ones((1, 4), np.float32), deadline_s=60)\n"
            "except KeyboardInterrupt:\n    c.close()\n    print('interrupted')\n"
        )
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            fake.wait_for(lambda: len(fake.requests) == 1, 20)
            child.send_signal(2)
            out, _ = child.communicate(timeout=20)
        finally:
            child.kill()
            child.wait()
        assert out.strip() == "interrupted"
        fake.wait_for(lambda: fake.cancelled == [fake.requests[0].request_id])


def test_want_of_descriptors_is_told_and_ends_no_process() -> None:
    """libzmq ends it when it has begun a context, and the next descriptor is refused."""
    code = (
        "import os, resource, sys\n"
        "import numpy as np\n"
        "from blockflow.client import Client\n"
        "from blockflow.core.errors import BlockFlowError\n"
        "spares = map(int, sys.argv[2:])\n"
        "while (spare := next(spares, None)) is not None and os.fork():\n"
        "    status = os.waitstatus_to_exitcode(os.wait()[1])\n"
        "    print('ended', spare, status, flush=True)\n"
        "if spare is None:\n"
        "    sys.exit()\n"
        "Client(sys.argv[1]).close()\n"  # what is loaded late takes descriptors, too
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "soft = max(map(int, os.listdir('/proc/self/fd'))) + spare\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))\n"
        "try:\n"
        "    with Client(sys.argv[1], shared_memory='off') as client:\n"
        "        client.infer('echo', np.ones((1, 1 << 18), np.float32))\n"
        "except BlockFlowError as e:\n"
        "    print(e.code)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft + 64, most))\n"
        "with Client(sys.argv[1], shared_memory='off') as client:\n"
        "    print(client.infer('echo', np.ones((1, 1 << 18), np.float32)).task)\n"
    )
    spares = ["0", "3", "8", "13"]
    with FakeDispatcher() as fake:
        status, output, errors = result_of(subprocess.Popen, code, fake.endpoint, *spares)
    expected = [word for n in spares for word in ("NO_SPACE", "echo", "ended", n, "0")]
    assert (status, output.split()) == (0, expected), errors
