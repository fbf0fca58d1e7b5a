"""Where REST and clients are served: addresses as they are given, bound and told."""

from __future__ import annotations

import socket

import pytest
from control_rig import Counter

from blockflow.control.crew import Crew
from blockflow.control.exposure import check_exposure
from blockflow.control.fleet import Place
from blockflow.control.settings import ControlSettings, is_address, is_loopback, with_port
from blockflow.control.system import refuse_unfit_address
from blockflow.core.errors import BlockFlowError
from blockflow.tensormq.sockets import is_v6


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("localhost", "localhost:5")],
)
def test_an_ipv6_address_stands_in_brackets(host: str, address: str) -> None:
    assert with_port(host, 5) == address
    assert is_v6(f"tcp://{address}") == (host == "::1")


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
        refuse_unfit_address(host, listener.getsockname()[1])
    assert caught.value.code == "PORT_IN_USE"


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_machine_is_found_out_first(host: str) -> None:
    with pytest.raises(BlockFlowError, match=host) as caught:
        refuse_unfit_address(host, 0)
    assert (caught.value.code, caught.value.where) == ("INVALID_REQUEST", "--client-host")
