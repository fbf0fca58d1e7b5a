"""Where REST and clients are served: addresses as they are given, bound and told."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from control_rig import Counter

from blockflow.control.crew import Crew
from blockflow.control.exposure import check_exposure
from blockflow.control.fleet import Place
from blockflow.control.settings import ControlSettings, is_address, is_loopback, with_port
from blockflow.control.system import hold_address
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.ports import is_v6


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("localhost", "localhost:5")],
)
def test_an_ipv6_address_stands_in_brackets(host: str, address: str) -> None:
    assert with_port(host, 5) == address
    assert is_v6(f"tcp://{address}") == (host == "::1")


def test_a_name_with_ipv6_addresses_only_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    v4, v6 = (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")
    names = {"four": [v4], "six": [v6, v6], "both": [v6, v4]}

    def look_up(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(family, 1, 6, "", (address, 0)) for family, address in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found = {h: is_v6(f"tcp://{h}:5755") for h in (*names, "none", "a" * 300)}
    assert [h for h in found if found[h]] == ["six"]
    assert not is_v6("ipc:///tmp/six:1")
    with pytest.raises(BlockFlowError, match="'none' has no address") as caught:
        hold_address("none", 0)
    assert (caught.value.code, caught.value.where) == ("INVALID_REQUEST", "--client-host")


ONLY_SIX = """
from pathlib import Path
import zmq
from blockflow.tensormq.sockets import bind_pull, connect_push, new_context
with new_context() as context:
    pull, endpoint = bind_pull(context, "tcp", Path("."), 1, host="six.test")
    port = endpoint.rpartition(":")[2]
    assert endpoint == f"tcp://[::1]:{port}", endpoint
    push = connect_push(context, f"tcp://six.test:{port}")
    assert push.poll(10_000, zmq.POLLOUT), "no connection"
    push.send(b"here")
    assert pull.poll(10_000), "nothing came"
    push.close(0), pull.close(0)
"""


def test_sockets_meet_at_a_name_with_ipv6_addresses_only(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("::1 six.test\n")
    inner = f'mount --bind {hosts} /etc/hosts && exec "$0" "$@"'
    known = ["unshare", "-m", "sh", "-c", inner]
    if shutil.which("unshare") is None or subprocess.run([*known, "true"], check=False).returncode:
        pytest.skip("no mount namespace may be made here")
    done = subprocess.run(
        [*known, sys.executable, "-c", ONLY_SIX],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("given", ["::1", "[::1]"])
def test_clients_are_served_where_the_settings_say(given: str) -> None:
    settings = ControlSettings(host=given, client_host=given, client_port=7)
    assert (settings.host, settings.client_host) == ("::1", "::1")
    assert check_exposure(settings) is None
    crew = Crew(settings, Place("/run", "", ""), Counter())
    assert crew.client_endpoints == ("tcp://[::1]:7", "ipc:///run/clients.sock")


@pytest.mark.parametrize("host", ["[::1", "::1]", "[[::1]]", "[]"])
def test_odd_brackets_are_no_loopback(host: str) -> None:
    assert not is_loopback(host) and not is_address(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_taken_is_found_out_first(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as e:
        pytest.skip(f"{host} cannot be listened on: {e}")
    with listener, pytest.raises(BlockFlowError) as caught:
        hold_address(host, listener.getsockname()[1])
    assert caught.value.code == "PORT_IN_USE"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_machine_is_found_out_first(host: str) -> None:
    with pytest.raises(BlockFlowError, match=host) as caught:
        hold_address(host, 0)
    assert (caught.value.code, caught.value.where) == ("INVALID_REQUEST", "--client-host")
