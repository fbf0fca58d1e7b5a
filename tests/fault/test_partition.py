"""Clients and Dispatcher in network namespaces of their own: packets vanish, nobody is told.

No proxy ends a connection here and no reset comes: packets of one side go to an address that
nobody has, or those of both. In flight is then ended on either side by silence alone: by that of
the kernels, which acknowledge nothing. The heartbeats' own time-out is longer than a deadline.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

SCRIPT = """
import ctypes, json, os, subprocess, threading
from contextlib import ExitStack

import numpy as np
from dispatcher_rig import rig, task, wait_until

from blockflow.client import Client
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.janitor import run_root

LONG_S = 60.0
X = np.ones((1, 4), np.float32)
libc = ctypes.CDLL(None, use_errno=True)
NEW_NET = 0x40000000


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def mac(device):
    return json.loads(ip("-j", "link", "show", device))[0]["address"]


class Far:
    \"\"\"A client in a namespace of its own, at the other end of a cable.

    Its thread lives in that namespace, and whatever it starts does.
    \"\"\"

    def __init__(self, n):
        self.n = n
        self.here, self.there = f"10.77.{n}.1", f"10.77.{n}.2"
        self.calls, self.ready = [], threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        threading.Thread(target=self.run, daemon=True).start()
        self.call(self.plug)
        ip("addr", "add", f"{self.here}/24", "dev", f"near{n}")
        ip("link", "set", f"near{n}", "up")
        self.macs = {"up": mac(f"near{n}"), "down": self.call(mac, "far")}

    def run(self):
        if libc.unshare(NEW_NET) != 0:
            self.refused = os.strerror(ctypes.get_errno())
        while True:
            self.ready.acquire()
            function, args = self.calls.pop()
            self.answer = function(*args)
            self.done.release()

    def call(self, function, *args):
        self.calls.append((function, args))
        self.ready.release()
        assert self.done.acquire(timeout=LONG_S)
        return self.answer

    def plug(self):
        near = ["peer", "name", f"near{self.n}", "netns", str(os.getpid())]
        ip("link", "add", "far", "type", "veth", *near)
        ip("addr", "add", f"{self.there}/24", "dev", "far")
        ip("link", "set", "far", "up")

    def connect(self, port):
        self.client = self.call(
            lambda: Client(f"tcp://{self.here}:{port}", connect_timeout_s=LONG_S)
        )

    def cable(self, ways, whole):
        \"\"\"Send what goes these ways to the right address, or to one that nobody has.\"\"\"
        for way in ways:
            to = self.macs[way] if whole else "02:00:00:00:00:99"
            words = ["lladdr", to, "nud", "permanent"]
            if way == "up":
                self.call(ip, "neigh", "replace", self.here, *words, "dev", "far")
            else:
                ip("neigh", "replace", self.there, *words, "dev", f"near{self.n}")


out = {}
with ExitStack() as stack:
    cut = {"up": Far(1), "down": Far(2), "both": Far(3)}
    ways = {"up": ["up"], "down": ["down"], "both": ["up", "down"]}
    r = stack.enter_context(rig(run_root(), client_endpoints=("tcp://0.0.0.0:0",)))
    worker = r.worker(11, {1: "e"})
    r.publish(task("t", ["e"]))
    port = r.server.client_endpoints[0].rpartition(":")[2]
    for far in cut.values():
        far.connect(port)
        stack.callback(far.client.close)
        assert far.client.infer("t", X, deadline_s=LONG_S).value[0, 0] == 2
    worker.behave["e"] = lambda v: None
    begun = len(worker.seen)
    asked = {k: far.client.submit("t", X, deadline_s=LONG_S) for k, far in cut.items()}
    wait_until(lambda: len(worker.seen) == begun + len(cut))
    assert len(r.exchange.table) == len(cut)
    for k, far in cut.items():
        far.cable(ways[k], whole=False)
    for k, future in asked.items():
        try:
            out[k] = str(future.result(LONG_S).value)
        except BlockFlowError as e:
            out[k] = e.code
    wait_until(lambda: len(r.exchange.table) == 0)
    out["withdrawn"] = r.exchange.stats.events["client_gone"] >= len(cut)
    worker.behave.clear()
    for k, far in cut.items():
        far.cable(ways[k], whole=True)
    for k, far in cut.items():
        out[k, "after"] = float(far.client.infer("t", X, deadline_s=LONG_S).value[0, 0])
    wait_until(r.idle)
print(json.dumps({" ".join(k) if isinstance(k, tuple) else k: v for k, v in out.items()}))
"""


@pytest.mark.timeout(400)  # on a machine that others share
def test_packets_that_vanish_in_silence() -> None:
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    probe = ["unshare", "-n", "ip", "link", "add", "type", "veth"]
    tried = subprocess.run(probe, capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        pytest.skip(f"no network namespace with a cable may be made here: {tried.stderr.strip()}")
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "up": "CONNECTION_LOST",
        "down": "CONNECTION_LOST",
        "both": "CONNECTION_LOST",
        "withdrawn": True,
        "up after": 2.0,
        "down after": 2.0,
        "both after": 2.0,
    }, done.stderr
