"""What REST makes of a request before and after the commands: over commands that only take note."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from blockflow.control.auth import API, API_HEADER, TokenAuth
from blockflow.control.commands import MAX_HZ, WAIT_S, Commands
from blockflow.control.rest import patience
from blockflow.control.rest.defects import WHOLE
from blockflow.control.rest.refusals import MOST_BYTES
from blockflow.control.rest.server import RestServer
from blockflow.core import limits
from blockflow.core.errors import SystemError_
from tests import plain_http
from tests.rest_rig import error_of

JSON = {"Content-Type": "application/json"}


class Noted:
    """Commands that do nothing: each call is kept, and answered with what is set for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kw: Any) -> Any:
            self.calls.append((name, args, kw))
            answer = self.answers.get(name, {"update": {"state": "done"}})
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RestServer, Noted]]:
    noted = Noted()
    server = RestServer(
        cast(Commands, noted), "", lambda: noted.shutdown(), host="127.0.0.1", port=0
    )
    server.start()
    yield server, noted
    server.stop()


@pytest.fixture
def commands(served: tuple[RestServer, Noted]) -> Noted:
    served[1].__init__()  # type: ignore[misc]
    return served[1]


@pytest.fixture(scope="module")
def http(served: tuple[RestServer, Noted]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served[0].url) as client:
        yield client


def raw(server: RestServer, text: bytes) -> bytes:
    with socket.create_connection((server.host, server.port), 10) as s:
        s.sendall(text)
        return b"".join(iter(lambda: s.recv(65536), b""))


# --- paths and methods


def test_every_answer_says_whose_it_is_and_is_not_kept(http: httpx.Client, commands: Noted) -> None:
    for answer in (http.get("/v1/epoch"), http.get("/v1/none"), http.put("/v1/epoch")):
        assert answer.headers[API_HEADER] == API
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_head_request_runs_nothing_that_changes_something(
    http: httpx.Client, commands: Noted
) -> None:
    for path in ("/v1/shutdown", "/v1/ping", "/v1/blocks/a/stop"):
        answer = http.head(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert commands.calls == []


def test_slashes_too_many_name_nothing(http: httpx.Client, commands: Noted) -> None:
    assert http.post("/v1/blocks//drain").status_code == 405  # of a block of that name
    assert commands.calls == []
    for path in ("/v1/epoch/", "/v1//epoch"):
        assert http.get(path).status_code == 200


@pytest.mark.parametrize("query", ["wait=", "wait", "wait=2", "wait=false&wait=false", "dry_run=1"])
def test_a_flag_that_says_neither_is_refused(
    http: httpx.Client, commands: Noted, query: str
) -> None:
    error = error_of(http.post(f"/v1/blocks/a/drain?{query}"))
    assert (error["code"], error["where"]) == ("INVALID_REQUEST", "query")
    assert commands.calls == []


def test_what_is_no_json_number_is_a_defect_and_not_an_answer(
    http: httpx.Client, commands: Noted
) -> None:
    commands.answers["epoch"] = {"epoch": math.nan}
    assert error_of(http.get("/v1/epoch"))["code"] == "INTERNAL"


@pytest.mark.parametrize(
    "twice",
    ["Authorization: Bearer x", "Content-Type: application/json", "Sec-Fetch-Site: none"],
)
def test_who_asks_and_what_comes_is_said_once(served: tuple[RestServer, Noted], twice: str) -> None:
    head = f"GET /v1/epoch HTTP/1.1\r\nHost: localhost\r\n{twice}\r\n{twice}\r\n\r\n"
    assert b"comes more than once" in raw(served[0], head.encode())


@pytest.mark.parametrize("later", ["Sec-Fetch-Site", "sec-fetch-site", "Sec_Fetch_Site"])
def test_another_site_is_not_talked_away(
    served: tuple[RestServer, Noted], commands: Noted, later: str
) -> None:
    head = "POST /v1/shutdown HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    answer = raw(served[0], f"{head}Sec-Fetch-Site: cross-site\r\n{later}: none\r\n\r\n".encode())
    assert answer[9:12] in (b"400", b"403")
    assert commands.calls == []


def test_no_header_passes_for_another_one(served: tuple[RestServer, Noted]) -> None:
    """WSGI knows them by names in which a hyphen and an underscore are the same."""
    head = b"GET /v1/epoch HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n"
    assert b"evil.example" in raw(served[0], head + b"X_Odd: 1\r\n\r\n")
    answer = raw(served[0], head.replace(b"Host", b"H_ost") + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_what_is_refused_before_it_is_read_is_told_in_its_own_words(
    served: tuple[RestServer, Noted],
) -> None:
    answer = raw(served[0], b"GET //v1//epoch/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"The path begins with two slashes" in answer
    answer = raw(served[0], b"GET http://x/v1/epoch HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"not a proxy" in answer
    answer = raw(served[0], b"GET /v1/epoch HTTP/1.1\r\nHost: local\r\n host\r\n\r\n")
    assert b"Host comes more than once, or in several lines" in answer


def test_a_head_that_the_server_refuses_has_no_body_either(
    served: tuple[RestServer, Noted],
) -> None:
    answer = raw(served[0], b"HEAD /v1/epoch HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and answer.endswith(b"\r\n\r\n")


def test_the_token_is_looked_at_before_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("s" * 40)
    path.chmod(0o600)
    noted = Noted()
    server = RestServer(
        cast(Commands, noted), "", noted.shutdown, host="127.0.0.1", port=0, auth=TokenAuth(path)
    )
    server.start()
    try:
        good = {"Authorization": "Bearer " + "s" * 40}
        with httpx.Client(base_url=server.url) as client:
            for method, url, status in (
                ("GET", "/v1/epoch", 200),
                ("GET", "/v1/none", 404),
                ("PUT", "/v1/epoch", 405),
            ):
                answer = client.request(method, url)
                assert error_of(answer)["code"] == "UNAUTHORIZED"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "allow" not in answer.headers
                answer = client.request(method, url, headers=good)
                assert answer.status_code == status
                assert "www-authenticate" not in answer.headers
    finally:
        server.stop()


def test_a_long_name_is_not_sent_back(http: httpx.Client, commands: Noted) -> None:
    http.get(f"/v1/blocks/{'b' * 60_000}")
    ((_, (name,), _),) = commands.calls
    assert name == "b" * 200 + "..."
    # what a body has in it is shortened on its way out
    commands.answers["store_kpis"] = SystemError_("BAD_BODY", "m" * 900_000, where="w" * 900_000)
    answer = http.post("/v1/kpis/store", json={"file": "x"})
    assert error_of(answer)["message"].startswith("mmm") and len(answer.content) < 10_000


def test_a_body_makes_no_large_answer(http: httpx.Client, commands: Noted) -> None:
    twice = ", ".join(['{"a": 1, "a": 1}'] * 110)
    body = f'{{"{"k" * 900_000}": [{twice}]}}'.encode()
    answer = http.post("/v1/monitor", content=body, headers=JSON)
    assert error_of(answer)["code"] == "BAD_BODY" and len(answer.content) < MOST_BYTES


def test_a_flood_of_defects_does_not_fill_the_log(
    http: httpx.Client, commands: Noted, caplog: pytest.LogCaptureFixture
) -> None:
    commands.answers["epoch"] = {"epoch": math.nan}
    for _ in range(20):
        http.get("/v1/epoch")
    assert caplog.text.count("Traceback") <= WHOLE


def test_large_documents_are_made_once_for_all_that_wait(
    http: httpx.Client, commands: Noted, served: tuple[RestServer, Noted]
) -> None:
    """And one at a time, whichever they are."""
    at_once, most, made = 0, 0, 0

    class Slow(Noted):
        def __getattr__(self, name: str) -> Any:
            def call() -> Any:
                nonlocal at_once, most, made
                at_once += 1
                made += 1
                most = max(most, at_once)
                time.sleep(0.05)
                at_once -= 1
                return {"made": made}

            return call

    server = RestServer(cast(Commands, Slow()), "", lambda: None, host="127.0.0.1", port=0)
    server.start()
    try:
        with ThreadPoolExecutor(20) as pool:
            urls = [f"{server.url}/v1/{('status', 'kpis')[n % 2]}" for n in range(20)]
            answers = list(pool.map(lambda url: plain_http.get(url).status_code, urls))
    finally:
        server.stop()
    assert answers == [200] * 20
    assert most == 1 and made < 20


def test_the_former_version_of_http_will_do(
    served: tuple[RestServer, Noted], commands: Noted
) -> None:
    answer = raw(served[0], b"GET /v1/epoch HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"done"' in answer


def test_who_is_refused_while_he_sends_hears_why(served: tuple[RestServer, Noted]) -> None:
    """What is closed while something is unread is reset, and the answer may be lost."""
    head = b"POST /v1/monitor HTTP/1.1\r\nHost: localhost\r\n"
    for length in (b"x", b"%d" % (1 << 30)):
        answer = raw(
            served[0], head + b"Content-Length: " + length + b"\r\n\r\n" + b" " * (3 << 20)
        )
        assert b"\r\nConnection: close\r\n" in answer and answer.endswith(b"}")


def test_a_connection_takes_several_requests(served: tuple[RestServer, Noted]) -> None:
    """Also after one that was refused, whose body is read to its end."""
    ask = b"POST /v1/%s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n%s"
    kind = b"Content-Type: application/json\r\n"
    refused = ask % (b"none", 200_000, kind, b" " * 200_000)
    last = ask % (b"monitor", 12, kind + b"Connection: close\r\n", b'{"on": true}')
    answer = raw(served[0], refused + last)
    assert answer.startswith(b"HTTP/1.1 404 ") and answer.count(b"HTTP/1.1 200 ") == 1


# --- bodies


@pytest.mark.parametrize("body", [b"[]", b"0", b'""', b"false", b'{"a": 1, "a": 1}'])
def test_who_takes_no_body_takes_none(http: httpx.Client, commands: Noted, body: bytes) -> None:
    error = error_of(http.post("/v1/ping", content=body, headers=JSON))
    assert (error["code"], error["where"]) == ("BAD_BODY", "$")
    assert commands.calls == []


@pytest.mark.parametrize("body", [b"", b"{}", b"null"])
def test_an_empty_one_is_none(http: httpx.Client, commands: Noted, body: bytes) -> None:
    commands.answers["ping"] = []
    assert http.post("/v1/ping", content=body, headers=JSON).status_code == 200


def test_a_body_that_is_encoded_is_not_taken_for_what_it_is(http: httpx.Client) -> None:
    for coding, status in (("gzip", 415), ("identity, br", 415), ("identity", 200)):
        head = {**JSON, "Content-Encoding": coding}
        assert http.post("/v1/monitor", content=b'{"on":true}', headers=head).status_code == status


def test_a_body_may_be_as_large_as_is_said(http: httpx.Client, commands: Noted) -> None:
    body = b'{"on": true}'
    whole = body + b" " * (limits.MAX_REST_BODY_BYTES - len(body))
    assert http.post("/v1/monitor", content=whole, headers=JSON).status_code == 200
    error = error_of(http.post("/v1/monitor", content=whole + b" ", headers=JSON))
    assert error["code"] == "BODY_TOO_LARGE"


def test_a_body_that_does_not_come_is_told_so(
    served: tuple[RestServer, Noted], commands: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "WHOLE_S", 0.2)
    head = b"POST /v1/monitor HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = raw(served[0], head + b"Content-Length: 12\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 400 ") and b"the body broke off" in answer
    assert commands.calls == []


def test_what_stands_twice_in_a_small_body_is_refused(http: httpx.Client, commands: Noted) -> None:
    body = b'{"on": true, "on": false, "on": true, "hz": 1, "hz": 2}'
    error = error_of(http.post("/v1/monitor", content=body, headers=JSON))
    assert [p["path"] for p in error["details"]["problems"]] == ["$.on", "$.hz"]
    assert commands.calls == []


# --- what the commands are asked


@pytest.mark.parametrize(
    ("query", "wait_s"), [("", WAIT_S), ("?wait=TRUE", WAIT_S), ("?wait=false", 0.0)]
)
def test_updates_are_waited_for_as_asked(
    http: httpx.Client, commands: Noted, query: str, wait_s: float
) -> None:
    http.post(f"/v1/system-update{query}", json={"blocks": []})
    http.post(f"/v1/rollback{query}", json={"to": 3})
    http.post(f"/v1/blocks/a/restart{query}")
    assert commands.calls == [
        ("apply", ({"blocks": []},), {"wait_s": wait_s, "problems": []}),
        ("rollback", (3,), {"wait_s": wait_s}),
        ("operate", ("restart", "a"), {"wait_s": wait_s}),
    ]


def test_a_dry_run_is_none(http: httpx.Client, commands: Noted) -> None:
    twice = b'{"blocks": [], "blocks": []}'
    http.post("/v1/system-update?dry_run=true", content=twice, headers=JSON)
    http.post("/v1/rollback?dry_run=true", json={"to": 3})
    http.post("/v1/rollback?dry_run=true", json={})
    (preview, (body, (problem,)), none), *rollbacks = commands.calls
    assert (preview, body, problem.path, none) == ("preview", {"blocks": []}, "$.blocks", {})
    assert rollbacks == [
        ("rollback", (3,), {"dry_run": True}),
        ("rollback", (None,), {"dry_run": True}),
    ]


@pytest.mark.parametrize("state", ["preparing", "draining", "done", "unchanged", "failed"])
def test_an_update_that_goes_on_is_accepted_only(
    http: httpx.Client, commands: Noted, state: str
) -> None:
    commands.answers["operate"] = {"update": {"state": state}}
    status = 202 if state in ("preparing", "draining") else 200
    assert http.post("/v1/blocks/a/stop").status_code == status


def test_the_rate_of_samples(http: httpx.Client, commands: Noted) -> None:
    for order in ({"on": True}, {"on": True, "hz": MAX_HZ}, {"on": False, "hz": 1}):
        assert http.post("/v1/monitor", json=order).status_code == 200
    assert [args for _, args, _ in commands.calls] == [(4.0,), (MAX_HZ,), (0.0,)]


def test_the_number_of_an_update(http: httpx.Client, commands: Noted) -> None:
    assert http.get(f"/v1/updates/{'9' * 18}").status_code == 200
    assert commands.calls == [("update", (10**18 - 1,), {})]
    for text in ("9" * 19, "-1", "+1", "1.0", "0x1"):
        assert error_of(http.get(f"/v1/updates/{text}"))["code"] == "NOT_FOUND"


def test_all_that_were_pinged_have_to_answer(http: httpx.Client, commands: Noted) -> None:
    commands.answers["ping"] = [{"ok": True}, {"ok": False}]
    assert http.post("/v1/ping").json()["ok"] is False
    http.post("/v1/blocks/a/ping")
    assert [args for _, args, _ in commands.calls] == [(None,), ("a",)]


def test_who_does_not_turn_is_not_live(http: httpx.Client, commands: Noted) -> None:
    commands.answers["epoch"] = SystemError_("TIMEOUT", "the manager's thread does not answer")
    assert error_of(http.get("/v1/health/live"))["code"] == "TIMEOUT"


def test_who_is_not_ready_says_why(http: httpx.Client, commands: Noted) -> None:
    reasons = [f"block {n}" for n in range(7)]
    commands.answers["health"] = {"ready": False, "reasons": reasons}
    answer = http.get("/v1/health/ready")
    assert answer.json()["reasons"] == reasons
    error = error_of(answer)
    assert error["message"] == "; ".join(reasons[:5])
    assert error["details"] == {"reasons": reasons}
