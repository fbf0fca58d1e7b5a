"""The CherryPy application: HTTP in front of the resource table.

Nothing of CherryPy's global engine or configuration is used, so that several of these can live in
one process, one after the other or side by side.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import cherrypy
from cheroot.errors import FatalSSLAlert

from blockflow.control.auth import TokenAuth
from blockflow.control.rest.body import JSON_TYPE, check_content_type, parse_json, read_body
from blockflow.control.rest.defects import Defects
from blockflow.control.rest.origin import SAFE_METHODS, SCHEMES, check_origin
from blockflow.control.rest.query import read_query
from blockflow.control.rest.refusals import error_text
from blockflow.control.rest.request import refusal
from blockflow.control.rest.resources import Answer, Call, Resource
from blockflow.control.rest.turns import Turns
from blockflow.control.settings import is_address, is_loopback
from blockflow.core.errors import BlockFlowError, Problem, RequestError, SystemError_
from blockflow.core.jsonpath import shortened

log = logging.getLogger("blockflow.rest")

_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_MOST_SEGMENT = 200
"""Characters of a name in a path; no block and no worker has a longer one."""

_LARGE = frozenset(
    {
        "getStatus",
        "getKpis",
        "listTasks",
        "listBlocks",
        "listWorkers",
        "listHistory",
        "listUpdates",
        "getTopology",
        "listRepository",
    }
)
"""Operations whose documents grow with the topology."""

_NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class RestApp:
    """Routes requests to resources; every answer, errors included, is JSON.

    Args:
        table: the resources.
        host: the address it is bound to; requests must name it or a loopback name in ``Host``, so
            that a web page cannot reach it through a name of its own (DNS rebinding). Beyond
            loopback, any numeric address may stand there as well: no page can give that a meaning.
        auth: checks tokens, None = none is needed.
        names: further names that may stand in ``Host``.
        schemes: that its URL may have, with those of a proxy before it.
    """

    def __init__(
        self,
        table: Sequence[Resource],
        host: str,
        auth: TokenAuth | None,
        names: Collection[str] = (),
        schemes: Collection[str] = SCHEMES,
    ) -> None:
        self._routes: dict[int, list[tuple[list[str], Resource]]] = {}
        for resource in table:
            parts = resource.path.strip("/").split("/")
            self._routes.setdefault(len(parts), []).append((parts, resource))
        self._hosts = _LOCAL_NAMES | {n.lower() for n in (host, *names)}
        self._addresses = not is_loopback(host)
        self._auth = auth
        self._schemes = schemes
        self._defects = Defects(log)
        self._turns: Turns[tuple[int, bytes]] = Turns()

    def wsgi(self) -> Any:
        """The WSGI application."""
        config = {
            "/": {
                "request.process_request_body": False,
                "request.show_tracebacks": False,
                "request.show_mismatched_params": False,
                "request.dispatch": _one_handler(self._serve),
                "error_page.default": _error_page,
                "response.stream": False,
            }
        }
        app = cherrypy.Application(None, "", config)
        app.request_class = _Request
        _silence(app.log)
        return app

    def _serve(self) -> bytes:
        request, response = cherrypy.serving.request, cherrypy.serving.response
        after = None
        try:
            resource, call = self._asked(request)
            if resource.operation in _LARGE:
                status, raw = self._turns.made(
                    resource.operation, lambda: _encoded(resource.handler(call))
                )
            else:
                answer = resource.handler(call)
                (status, raw), after = _encoded(answer), answer.after
        except BlockFlowError as e:
            status, raw = e.info.http, error_text(e).encode("ascii")
        except Exception:
            where = f"{request.method[:20]} {shortened(request.path_info, _MOST_SEGMENT)}"
            self._defects.report(where)
            error = SystemError_("INTERNAL", "the request hit a defect; see the log")
            status, raw = 500, error_text(error).encode("ascii")
        if status == 405:
            allowed = {r.method for _, r in self._matches(request.path_info)}
            response.headers["Allow"] = ", ".join(sorted(allowed))
        if status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        response.status = status
        response.headers["Content-Type"] = JSON_TYPE
        response.headers.update(_NO_STORE)
        if after is not None:
            after()
        return raw

    def _asked(self, request: Any) -> tuple[Resource, Call]:
        """Who may ask is looked at before what is there to be asked for."""
        headers = request.headers
        self._check_host(headers.get("Host"))
        if request.method not in SAFE_METHODS:
            origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
            check_origin(headers["Host"], origin, site, self._schemes)
        if self._auth is not None:
            self._auth.check(headers.get("Authorization"))
        resource, path = self._route(request.method, request.path_info)
        query, numbers = read_query(request.query_string, resource.flags, resource.numbers)
        body: Any = None
        duplicates: list[Problem] = []
        if resource.method == "POST":
            raw, kind = self._body(request), headers.get("Content-Type")
            # An HTML form always says what it sends, even nothing; `curl -X POST` says nothing.
            if raw or resource.body or kind is not None:
                check_content_type(kind, headers.get("Content-Encoding"))
            if raw or resource.body:
                body, duplicates = parse_json(raw)
            if not resource.body and body not in (None, {}):
                raise SystemError_("BAD_BODY", "this resource takes no body", where="$")
        return resource, Call(path, query, body, duplicates, numbers)

    def _body(self, request: Any) -> bytes:
        headers = request.headers
        length = headers.get("Content-Length")
        if length is None:
            return b""
        try:
            return read_body(request.rfile, length)
        except (OSError, FatalSSLAlert) as e:  # a reset, no TLS, or it took too long
            raise SystemError_("BAD_BODY", f"the body broke off: {e}", where="body") from e

    def _check_host(self, header: str | None) -> None:
        name = (header or "").strip().lower()
        host = name.rsplit(":", 1)[0] if not name.endswith("]") and ":" in name else name
        known = host in self._hosts or (self._addresses and is_address(host))
        if not host or not known:
            raise RequestError(
                "INVALID_REQUEST", f"host {name[:100]!r} is not this service", where="Host"
            )

    def _matches(self, path: str) -> list[tuple[dict[str, str], Resource]]:
        # The server has decoded all but %2F, and made one slash of several.
        segments = path.strip("/").split("/")
        out = []
        for parts, resource in self._routes.get(len(segments), ()):
            found: dict[str, str] = {}
            for part, segment in zip(parts, segments, strict=True):
                if part.startswith("{"):
                    found[part[1:-1]] = shortened(segment.replace("%2F", "/"), _MOST_SEGMENT)
                elif part != segment:
                    break
            else:
                out.append((found, resource))
        return out

    def _route(self, method: str, path: str) -> tuple[Resource, dict[str, str]]:
        found = self._matches(path)
        if not found:
            raise SystemError_(
                "NOT_FOUND", f"no resource {path[:200]!r}", hint="GET /openapi.json lists them"
            )
        for values, resource in found:
            if resource.method == method or (method == "HEAD" and resource.method == "GET"):
                return resource, values
        allowed = ", ".join(sorted({r.method for _, r in found}))
        raise SystemError_(
            "METHOD_NOT_ALLOWED", f"{method[:20]} {path[:200]}", hint=f"it takes {allowed}"
        )


def _encoded(answer: Answer) -> tuple[int, bytes]:
    document = json.dumps(answer.document, separators=(",", ":"), allow_nan=False)
    return answer.status, document.encode("utf-8")


def _silence(own: Any) -> None:
    """Of an application's ``own`` log nobody sees anything: ``_serve`` tells of defects. CherryPy
    lists the log of every application that there ever was in a process; this one ends with it."""
    own.screen = False
    cherrypy.engine.unsubscribe("graceful", own.reopen_files)
    for logger in (own.error_log, own.access_log):
        logger.disabled = True
        logging.Logger.manager.loggerDict.pop(logger.name, None)


def _one_handler(handler: Any) -> Any:
    """A CherryPy dispatcher that sends every path to ``handler``: routing is the table's."""

    def dispatch(path_info: str) -> None:
        request = cherrypy.serving.request
        request.config = {**cherrypy.config, **request.app.config.get("/", {})}
        request.handler = handler

    return dispatch


def _error_page(status: str, message: str, traceback: str, version: str) -> bytes:
    """What CherryPy itself refuses before a resource is reached."""
    cherrypy.serving.response.headers["Content-Type"] = JSON_TYPE
    return json.dumps({"error": refusal(status, message).to_dict()}).encode("utf-8")


class _Request(cherrypy.Application.request_class):  # type: ignore[misc]
    """Without what CherryPy makes of heads before its configuration counts (cookies, encoded words,
    queries): nobody reads it here, and what it refuses there it answers as a page."""

    show_tracebacks = False
    error_page: ClassVar[dict[str, Any]] = {"default": _error_page}

    def process_headers(self) -> None:
        for name, value in self.header_list:
            self.headers[name] = value.strip()
        self.base = ""  # of redirects, of which there are none

    def process_query_string(self) -> None:
        """Each resource reads its own."""
