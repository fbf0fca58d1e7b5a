"""REST and pages of other sites: what a browser may be made to send changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from blockflow.control.auth import TokenAuth
from blockflow.control.rest.server import RestServer
from blockflow.control.system import System
from tests import rest_rig
from tests.rest_rig import error_of, fits

system, http, document, deployed = (
    rest_rig.system,
    rest_rig.http,
    rest_rig.document,
    rest_rig.deployed,
)

EVIL = {"Origin": "https://evil.example"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
PLAIN = {"Content-Type": "text/plain;charset=UTF-8"}
JSON_TYPE = {"Content-Type": "application/json"}
FOREIGN = {
    "a form without a body": (EVIL | FORM, b""),
    "a form with a body": (EVIL | FORM, b"a=1"),
    "a form of plain text": (EVIL | PLAIN, b'{"on": true}'),
    "fetch, no-cors, without a body": (EVIL, b""),
    "fetch, no-cors, with a body": (EVIL | PLAIN | {"Sec-Fetch-Site": "cross-site"}, b"{}"),
    "JSON, should a browser let it through": (EVIL | JSON_TYPE, b"{}"),
    "a sandboxed frame": ({"Origin": "null"} | FORM, b""),
    "an empty origin": ({"Origin": ""}, b""),
    "two origins": ({"Origin": "{own}, https://evil.example"}, b""),
    "another port of this machine": ({"Origin": "http://127.0.0.1:1"}, b""),
    "another name of this machine": ({"Origin": "http://localhost:{port}"}, b""),
    "its name in front": ({"Origin": "{own}.evil.example"}, b""),
    "a browser that tells the relation only": ({"Sec-Fetch-Site": "cross-site"}, b""),
    "the same site is not the same origin": ({"Sec-Fetch-Site": "same-site"} | JSON_TYPE, b"{}"),
}
OWN = {
    "curl": ({}, b""),
    "the SDK": (JSON_TYPE, b"{}"),
    "its own page": ({"Origin": "{own}", "Sec-Fetch-Site": "same-origin"} | JSON_TYPE, b"{}"),
    "its own page, older browser": ({"Origin": "{own}"}, b""),
    "its own page by another name": (
        {"Origin": "http://localhost:{port}", "Host": "localhost:{port}"},
        b"",
    ),
    "the user himself": ({"Sec-Fetch-Site": "none"}, b""),
}


@pytest.fixture(scope="module", params=["open", "token"])
def door(
    request: pytest.FixtureRequest, system: System, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Door]:
    """A second REST server of the system, which is asked to shut down and notes it only."""
    asked: list[int] = []
    auth, headers = None, {}
    if request.param == "token":
        path = tmp_path_factory.mktemp("token") / "token"
        path.write_text("s" * 40)
        path.chmod(0o600)
        auth, headers = TokenAuth(path), {"Authorization": "Bearer " + "s" * 40}
    server = RestServer(
        system.commands, "", lambda: asked.append(1), host="127.0.0.1", port=0, auth=auth
    )
    server.start()
    try:
        with httpx.Client(base_url=server.url, headers=headers) as client:
            yield Door(server, client, asked)
    finally:
        server.stop()


@dataclass
class Door:
    server: RestServer
    client: httpx.Client
    asked: list[int]

    def ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> httpx.Response:
        own = {"own": self.server.url, "port": self.server.port}
        told = {k: v.format(**own) for k, v in headers.items()}
        return self.client.request(method, path, headers=told, content=body)


@pytest.mark.parametrize("case", FOREIGN)
def test_a_page_of_another_site_changes_nothing(
    deployed: System, door: Door, document: dict[str, Any], case: str
) -> None:
    headers, body = FOREIGN[case]
    before = door.client.get("/v1/updates").json()
    for path in ("/v1/shutdown", "/v1/ping", "/v1/blocks/b/stop", "/v1/monitor"):
        answer = door.ask("POST", path, headers, body)
        assert error_of(answer)["code"] == "FOREIGN_ORIGIN"
        fits(document, answer, "post", path.replace("/b/", "/{name}/"))
        assert not any(h.startswith("access-control-") for h in answer.headers)
    for method, path in (("PUT", "/v1/shutdown"), ("DELETE", "/"), ("OPTIONS", "/v1/shutdown")):
        assert error_of(door.ask(method, path, headers, body))["code"] == "FOREIGN_ORIGIN"
    assert door.client.get("/v1/updates").json() == before
    assert door.asked == []


@pytest.mark.parametrize("case", OWN)
def test_programs_and_its_own_pages_may(door: Door, case: str) -> None:
    headers, body = OWN[case]
    before = len(door.asked)
    assert door.ask("POST", "/v1/shutdown", headers, body).status_code == 202
    assert len(door.asked) == before + 1


def test_what_a_form_sends_is_refused_without_an_origin_too(door: Door) -> None:
    """A browser from before 2020 says nothing of the page; a form still says its type."""
    before = len(door.asked)
    for kind in (
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/plain",
    ):
        for body in (b"", b"{}"):
            answer = door.ask("POST", "/v1/shutdown", {"Content-Type": kind}, body)
            assert error_of(answer)["code"] == "UNSUPPORTED_MEDIA"
    assert len(door.asked) == before


def test_reading_is_open_to_links_and_closed_to_scripts(door: Door) -> None:
    """Somebody may follow a link to it; without CORS headers no page reads what comes back."""
    answer = door.ask("GET", "/v1/epoch", EVIL | {"Sec-Fetch-Site": "cross-site"}, b"")
    assert answer.status_code == 200
    assert not any(h.startswith("access-control-") for h in answer.headers)


def test_a_foreign_page_does_not_learn_whether_there_is_a_token(door: Door) -> None:
    answer = door.ask("POST", "/v1/shutdown", EVIL | {"Authorization": "Bearer x"}, b"")
    assert error_of(answer)["code"] == "FOREIGN_ORIGIN"
