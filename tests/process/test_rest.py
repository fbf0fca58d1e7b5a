"""REST of a running system: every resource, every refusal; all answers fit the served document."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_rig import echo_repository, save_echoes

from blockflow.control.rest.server import RestServer
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from tests import rest_rig
from tests.rest_rig import error_of, fits

system, http, document, deployed = (
    rest_rig.system,
    rest_rig.http,
    rest_rig.document,
    rest_rig.deployed,
)

GETS = [
    ("/v1/updates", "/v1/updates"),
    ("/v1/updates/{id}", "/v1/updates/{id}"),
    ("/v1/history", "/v1/history"),
    ("/v1/topology", "/v1/topology"),
    ("/v1/epoch", "/v1/epoch"),
    ("/v1/tasks", "/v1/tasks"),
    ("/v1/blocks", "/v1/blocks"),
    ("/v1/blocks/{name}", "/v1/blocks/a"),
    ("/v1/workers", "/v1/workers"),
    ("/v1/workers/{name}", "/v1/workers/dispatcher"),
    ("/v1/workers/{name}", "/v1/workers/a%230"),
    ("/v1/kpis", "/v1/kpis"),
    ("/v1/health/live", "/v1/health/live"),
    ("/v1/health/ready", "/v1/health/ready"),
    ("/v1/status", "/v1/status"),
    ("/v1/repository", "/v1/repository"),
    ("/openapi.json", "/openapi.json"),
]


def test_an_empty_system_is_live_but_not_ready(
    http: httpx.Client, document: dict[str, Any]
) -> None:
    assert fits(document, http.get("/v1/health/live"), "get", "/v1/health/live")["live"]
    answer = http.get("/v1/health/ready")
    assert answer.status_code == 503
    told = fits(document, answer, "get", "/v1/health/ready")
    assert told["error"]["code"] == "NOT_READY" and "topology" in told["reasons"][0]
    assert http.get("/v1/status").json()["state"] == "empty"


def test_the_thesis_body_verbatim(
    http: httpx.Client, document: dict[str, Any], system: System
) -> None:
    save_echoes(system.settings.repository, "block1", "block2", "block3", "block4_class")
    body = """{"blocks": ["block1", "block2", "block3", "block4_class"],
               "tasks": {"task1": ["block1", "block2", "block3", "block4_class"]}}"""
    answer = http.post(
        "/v1/system-update", content=body, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200, answer.text
    told = fits(document, answer, "post", "/v1/system-update")
    assert told["epoch"] == 1 and told["update"]["state"] == "done"
    assert http.get("/v1/health/ready").status_code == 200


@pytest.mark.parametrize(("path", "url"), GETS)
def test_every_resource_answers_as_documented(
    deployed: System, http: httpx.Client, document: dict[str, Any], path: str, url: str
) -> None:
    answer = http.get(url.format(id=deployed.commands.updates()[0]["id"]))
    assert answer.status_code == 200, answer.text
    fits(document, answer, "get", path)


def test_every_get_of_the_document_was_tried(document: dict[str, Any]) -> None:
    assert {p for p, ops in document["paths"].items() if "get" in ops} == {p for p, _ in GETS}


def test_a_dry_run_tells_the_plan_only(
    deployed: System, http: httpx.Client, document: dict[str, Any]
) -> None:
    epoch = http.get("/v1/epoch").json()
    twice = "/v1/system-update?dry_run=true&dry_run=false"
    answer = http.post(twice, json={"blocks": ["a"], "tasks": {}})
    assert answer.status_code == 400 and "stands twice" in answer.text
    answer = http.post("/v1/system-update?dry_run=true", json={"blocks": ["a"], "tasks": {}})
    told = fits(document, answer, "post", "/v1/system-update")
    assert told["changed"] and told["plan"]["stop"] == ["b#0", "c#0"]
    assert told["plan"]["tasks"]["remove"] == ["t1", "t2"]
    assert http.get("/v1/epoch").json() == epoch


def test_an_update_need_not_be_waited_for(deployed: System, http: httpx.Client) -> None:
    body = {"blocks": ["a", "d"], "tasks": {"t": ["a", "d"]}}
    answer = http.post("/v1/system-update?wait=false", json=body)
    assert answer.status_code == 202
    update = answer.json()["update"]
    assert update["state"] == "preparing"
    deployed.manager.wait_update(update["id"], 30)
    assert http.get(f"/v1/updates/{update['id']}").json()["state"] == "done"


def test_all_problems_at_once_with_their_paths(deployed: System, http: httpx.Client) -> None:
    raw = b"""{"blocks": ["a", "aa", {"name": "b", "replica": 2}], "colour": 1,
               "tasks": {"t": ["a", "zz"], "u": [], "t": ["a"]}}"""
    answer = http.post(
        "/v1/system-update", content=raw, headers={"Content-Type": "application/json"}
    )
    error = error_of(answer)
    assert error["code"] == "INVALID_TOPOLOGY"
    paths = {p["path"] for p in error["problems"]}
    assert {"$.colour", "$.blocks[1]", "$.blocks[2].replica", "$.tasks.u", "$.tasks.t"} <= paths


def test_a_failed_update_tells_the_cause_and_keeps_the_old_epoch(
    deployed: System, http: httpx.Client
) -> None:
    epoch = http.get("/v1/epoch").json()["epoch"]
    answer = http.post(
        "/v1/system-update", json={"blocks": ["a", "broken"], "tasks": {"t": ["a", "broken"]}}
    )
    error = error_of(answer)
    assert error["code"] == "UPDATE_FAILED"
    assert error["details"]["cause"]["code"] == "LOAD_FAILED"
    assert http.get("/v1/epoch").json()["epoch"] == epoch
    assert http.get("/v1/health/ready").status_code == 200


def test_an_altered_artifact_is_refused_by_digest(deployed: System, http: httpx.Client) -> None:
    repository = echo_repository(deployed.settings.repository, altered={"delay_ms": 1})
    artifact = repository.root / "altered" / repository.manifest("altered").artifact
    artifact.write_bytes(artifact.read_bytes().replace(b"1", b"2"))
    answer = http.post("/v1/system-update", json={"blocks": ["altered"], "tasks": {}})
    (problem,) = error_of(answer)["problems"]
    assert problem["path"] == "$.blocks[0]" and "DIGEST_MISMATCH" in problem["message"]
    artifact.unlink()
    answer = http.post("/v1/system-update", json={"blocks": ["altered"], "tasks": {}})
    (problem,) = error_of(answer)["problems"]
    assert "ARTIFACT_MISSING" in problem["message"]


def test_pings(deployed: System, http: httpx.Client, document: dict[str, Any]) -> None:
    told = fits(document, http.post("/v1/ping"), "post", "/v1/ping")
    assert told["ok"]
    assert {p["worker"] for p in told["pings"]} == {"a#0", "b#0", "c#0", "dispatcher"}
    told = fits(document, http.post("/v1/blocks/b/ping"), "post", "/v1/blocks/{name}/ping")
    (ping,) = told["pings"]
    assert ping["worker"] == "b#0" and ping["rtt_ms"] > 0


def test_operations_on_a_block(
    deployed: System, http: httpx.Client, document: dict[str, Any]
) -> None:
    def state() -> str:
        return http.get("/v1/blocks/b").json()["state"]

    def act(verb: str) -> dict[str, Any]:
        answer = http.post(f"/v1/blocks/b/{verb}", json={})
        assert answer.status_code == 200, answer.text
        return fits(document, answer, "post", f"/v1/blocks/{{name}}/{verb}")["update"]

    assert act("drain")["state"] == "done"
    assert state() == "drained"
    assert act("drain")["state"] == "unchanged"
    assert http.get("/v1/health/ready").status_code == 503
    (task,) = [t for t in http.get("/v1/tasks").json()["tasks"] if t["name"] == "t1"]
    assert not task["available"] and task["missing"] == ["b"]
    assert act("undrain")["state"] == "done"
    assert state() == "ready"
    assert act("stop")["state"] == "done"
    assert state() == "stopped"
    assert http.get("/v1/blocks/b").json()["ready"] == 0
    assert error_of(http.post("/v1/blocks/b/undrain"))["code"] == "INVALID_REQUEST"
    assert not http.post("/v1/blocks/b/ping").json()["ok"]
    before = deployed.status()["workers"]
    assert act("restart")["state"] == "done"
    assert state() == "ready"
    kept = [w for w in before if w["name"] == "a#0"]
    assert [w["pid"] for w in deployed.status()["workers"] if w["name"] == "a#0"] == [
        w["pid"] for w in kept
    ]
    assert error_of(http.post("/v1/blocks/zz/restart"))["code"] == "UNKNOWN_BLOCK"


def test_the_monitor_and_stored_figures(
    deployed: System, http: httpx.Client, document: dict[str, Any]
) -> None:
    # A rate whose period no clock can wait for ends no thread.
    assert http.post("/v1/monitor", json={"on": True, "hz": 1e-300}).status_code == 200
    answer = http.post("/v1/monitor", json={"on": True, "hz": 20})
    assert fits(document, answer, "post", "/v1/monitor") == {"on": True, "hz": 20.0}
    deployed.manager.wait(lambda: deployed.manager.kpis.lines() or None, 10)
    answer = http.post("/v1/kpis/store", json={"file": "run1.jsonl"})
    told = fits(document, answer, "post", "/v1/kpis/store")
    path = Path(told["path"])
    assert path.parent == deployed.settings.state_dir / "kpis"
    lines = path.read_text().splitlines()
    assert len(lines) == told["count"] > 0
    assert {"time", "worker", "stages", "process"} <= set(json.loads(lines[-1]))
    order = {"file": "run1.jsonl", "force": False}
    again = error_of(http.post("/v1/kpis/store", json=order))
    assert (again["code"], again["where"]) == ("FILE_EXISTS", str(path))
    answer = http.post("/v1/kpis/store", json={**order, "force": True})
    assert fits(document, answer, "post", "/v1/kpis/store")["path"] == str(path)
    assert http.post("/v1/monitor", json={"on": False}).json() == {"on": False, "hz": 0.0}
    for name in ("../x.jsonl", "/etc/x.jsonl", "x", "", ".jsonl", "a/b.jsonl", "a.jsonl\n"):
        assert error_of(http.post("/v1/kpis/store", json={"file": name}))["where"] == "file"
    for rate in ({"on": True, "hz": 1000}, {"on": True, "hz": 0}, {"on": False, "hz": -1}):
        assert error_of(http.post("/v1/monitor", json=rate))["where"] == "hz", rate


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ({}, {"$.on"}),
        ({"on": 1}, {"$.on"}),
        ({"on": True, "hz": "4", "x": 1}, {"$.hz", "$.x"}),
        ({"on": True, "hz": True}, {"$.hz"}),
        ([], None),
        (1, None),
    ],
)
def test_wrong_types_in_small_bodies(http: httpx.Client, body: Any, paths: set[str] | None) -> None:
    error = error_of(http.post("/v1/monitor", json=body))
    assert error["code"] == "BAD_BODY"
    if paths is not None:
        assert {p["path"] for p in error["details"]["problems"]} == paths


def test_refusals_are_typed_json(http: httpx.Client) -> None:
    cases = [
        (http.get("/v1/nothing"), "NOT_FOUND"),
        (http.get("/"), "NOT_FOUND"),
        (http.get("/v1/updates/x"), "NOT_FOUND"),
        (http.get("/v1/updates/99999"), "NOT_FOUND"),
        (http.get("/v1/updates/\N{ARABIC-INDIC DIGIT ONE}"), "NOT_FOUND"),
        (http.get("/v1/workers/zz"), "NOT_FOUND"),
        (http.get("/v1/blocks/%2e%2e"), "UNKNOWN_BLOCK"),
        (http.get("/v1/blocks/%ff"), "UNKNOWN_BLOCK"),
        (http.get("/v1/blocks/a%2Fb"), "UNKNOWN_BLOCK"),
        (http.post("/v1/blocks/nobody/drain"), "UNKNOWN_BLOCK"),
        (http.post("/v1/blocks/%2e%2e%2fa/stop"), "UNKNOWN_BLOCK"),
        (http.post("/v1/monitor", json={"on": True, "hz": -1}), "INVALID_REQUEST"),
        (http.post("/v1/kpis/store", json={"file": "../../x.jsonl"}), "INVALID_REQUEST"),
        (http.delete("/v1/blocks"), "METHOD_NOT_ALLOWED"),
        (http.put("/v1/system-update", json={}), "METHOD_NOT_ALLOWED"),
        (http.get("/v1/status?x=1"), "INVALID_REQUEST"),
        (http.post("/v1/system-update?wait=maybe", json={}), "INVALID_REQUEST"),
        (http.post("/v1/system-update", content=b"{}"), "UNSUPPORTED_MEDIA"),
        (http.post("/v1/system-update", json=[1]), "INVALID_TOPOLOGY"),
        (http.post("/v1/ping", json={"x": 1}), "BAD_BODY"),
        (http.get("/v1/status", headers={"Host": "evil.example"}), "INVALID_REQUEST"),
        (http.get("/v1/status", headers={"Host": "localhost.evil.example:1"}), "INVALID_REQUEST"),
    ]
    for answer, code in cases:
        assert error_of(answer)["code"] == code, answer.request.url
    assert "'a/b'" in error_of(http.get("/v1/blocks/a%2Fb"))["message"]
    assert "POST" in http.put("/v1/ping").headers["allow"]
    assert http.get("/v1/epoch").status_code == 200


@pytest.mark.parametrize(
    "name", ["X-Odd", "Cookie", "Authorization", "Accept-Language", "Content-Type"]
)
@pytest.mark.parametrize(
    "value", ["=?nosuch?q?abc?=", "=?utf-8?q?=ff?=", "=?utf-8?b?a?=", "a[=b; c", "$Version=9; =; x"]
)
def test_odd_headers_do_no_harm(http: httpx.Client, name: str, value: str) -> None:
    answer = http.get("/v1/epoch", headers={name: value})
    assert answer.status_code == 200
    assert "epoch" in answer.json()


def test_heads_that_name_no_host_or_too_much(system: System, http: httpx.Client) -> None:
    with socket.create_connection((system.rest.host, system.rest.port), 5) as s:
        s.sendall(b"GET /v1/epoch HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: s.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 4")
    assert b'"INVALID_REQUEST"' in answer and b"Traceback" not in answer
    for query in ("&".join("a" * 40), "wait=%ff", "%00=1"):
        error = error_of(http.get(f"/v1/epoch?{query}"))
        assert (error["code"], error["where"]) == ("INVALID_REQUEST", "query")
    body = '{"on": true, "hz": 1' + "0" * 400 + "}"
    told = http.post("/v1/monitor", content=body, headers={"Content-Type": "application/json"})
    assert error_of(told)["where"] == "hz"


def test_a_head_request_has_no_body(http: httpx.Client) -> None:
    answer = http.head("/v1/epoch")
    assert answer.status_code == 200 and answer.content == b""


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x00\xff" * 200 + b"\r\n\r\n",
        b"GET /v1/epoch HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"POST /v1/ping HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/monitor HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v1/epoch HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    ],
)
def test_what_is_no_http_does_no_harm(system: System, http: httpx.Client, raw: bytes) -> None:
    with socket.create_connection((system.rest.host, system.rest.port), 5) as s:
        s.settimeout(15)
        try:
            s.sendall(raw)
            s.shutdown(socket.SHUT_WR)
            while s.recv(65536):
                pass
        except OSError:
            pass  # a refused connection may be reset
    assert http.get("/v1/health/live").status_code == 200


@pytest.mark.parametrize(
    "twice",
    [
        b"Content-Length: 2\r\nContent-Length: 11\r\n",
        b"Content-Length: 11\r\ncontent-length: 11\r\n",
        b"Content-Length: 2\r\n 11\r\n",
        b"Host: elsewhere\r\nContent-Length: 11\r\n",
        b"Origin: http://elsewhere\r\nOrigin: http://localhost\r\nContent-Length: 11\r\n",
        b"Content-Type: text/plain\r\nContent-Length: 11\r\n",
    ],
)
def test_what_must_stand_once_does(system: System, twice: bytes) -> None:
    """Of several, the server's library takes the last: not what a proxy before it may have read."""
    head = twice + b"Host: localhost\r\nContent-Type: application/json\r\n"
    answer = b""
    with socket.create_connection((system.rest.host, system.rest.port), 5) as s:
        s.settimeout(15)
        s.sendall(b"POST /v1/monitor HTTP/1.1\r\n" + head + b'\r\n{"on":true}')
        while piece := s.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"comes more than once" in answer


def test_ports_and_hosts_that_cannot_be_had(system: System) -> None:
    with pytest.raises(BlockFlowError) as e:
        RestServer(system.commands, "", lambda: None, host="127.0.0.1", port=system.rest.port)
    assert e.value.code == "PORT_IN_USE" and str(system.rest.port) in e.value.message
    for host in ("0.0.0.0", "192.0.2.1", "example.com", ""):
        with pytest.raises(BlockFlowError) as e:
            RestServer(system.commands, "", lambda: None, host=host, port=0)
        assert e.value.code == "INVALID_REQUEST"
