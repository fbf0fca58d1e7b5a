"""A REST client for commands: standard library only, typed errors, never a hang.

The same codes come back that the service raised: an error body is turned into the exception it was.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from blockflow.control.auth import TOKEN_VARIABLE, read_token
from blockflow.core.errors import BlockFlowError, RequestError, from_dict, make_error

DEFAULT_URL = "http://127.0.0.1:5780"
URL_VARIABLE = "BLOCKFLOW_URL"
MAX_ANSWER_BYTES = 32 * 1024 * 1024


class RestClient:
    """One control plane. A connection per call: commands make few.

    Args:
        url: ``http://host:port``; by default the environment's BLOCKFLOW_URL, else
            ``http://127.0.0.1:5780``.
        timeout_s: for the connection and for each answer.
        token_file: private file with the service's token; by default the environment's
            BLOCKFLOW_TOKEN_FILE, else no token is sent.

    Raises:
        RequestError: INVALID_REQUEST, the URL is none.
        SystemError_: UNAUTHORIZED, the token file is unfit.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout_s: float = 10.0,
        token_file: str | Path | None = None,
    ) -> None:
        self.url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        self._timeout_s = timeout_s
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if parts.scheme != "http" or not host:
            raise RequestError(
                "INVALID_REQUEST",
                "not the URL of a control plane",
                where=self.url,
                hint="use http://host:port",
            )
        self._host, self._port, self._prefix = host, port or 80, parts.path
        file = token_file or os.environ.get(TOKEN_VARIABLE)
        self._token = read_token(Path(file)).decode("ascii") if file else ""

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """GET a resource; returns its JSON document.

        Raises:
            BlockFlowError: the service's own error, NOT_RUNNING when nothing answers, TIMEOUT.
        """
        return self._call("GET", path, query, None, self._timeout_s)

    def post(
        self,
        path: str,
        body: bytes | Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """POST a JSON body (bytes are sent as they are); returns the JSON answer. Errors as get."""
        raw = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return self._call("POST", path, query, raw, timeout_s or self._timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: bytes | None,
        timeout_s: float,
    ) -> Any:
        target = self._prefix + path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            try:
                connection.connect()
            except OSError as exc:
                raise self._not_running(str(exc)) from exc
            connection.request(method, target, body, headers)
            answer = connection.getresponse()
            raw = answer.read(MAX_ANSWER_BYTES + 1)
        except TimeoutError as exc:
            raise make_error(
                "TIMEOUT", f"no answer within {timeout_s:g} s", where=f"{self.url}{path}"
            ) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise self._not_running(f"the answer broke off: {exc!r}") from exc
        finally:
            connection.close()
        return self._read(answer.status, raw, path)

    def _read(self, status: int, raw: bytes, path: str) -> Any:
        try:
            document = json.loads(raw) if len(raw) <= MAX_ANSWER_BYTES else None
        except ValueError:
            document = None
        if document is None:
            raise self._not_running(f"what answers there (HTTP {status}) is not BlockFlow")
        if status < 400:
            return document
        error = document.get("error") if isinstance(document, dict) else None
        if not isinstance(error, dict):
            raise make_error("INTERNAL", f"HTTP {status} without a reason", where=self.url + path)
        raise from_dict(error)

    def _not_running(self, why: str) -> BlockFlowError:
        return make_error(
            "NOT_RUNNING",
            f"no BlockFlow control plane: {why}",
            where=self.url,
            hint="start one with `blockflow up`, or pass --url",
        )


def segment(name: str) -> str:
    """A name as one segment of a path."""
    return quote(name, safe="")
