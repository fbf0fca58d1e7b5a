"""A control plane's REST side with canned answers; remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from blockflow.control.auth import API, API_HEADER

Answer = tuple[int, Any]


class FakeRest:
    """``answers`` maps ``"METHOD /path"`` to (status, document), raw bytes, or a function of the
    body that gives one of these. Unknown paths answer NOT_FOUND. ``headers`` are in each answer."""

    def __init__(self, answers: dict[str, Answer | bytes | Callable[[bytes], Answer]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, bytes]] = []
        self.headers = {API_HEADER: API}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._serve(b"")

            def do_POST(self) -> None:
                self._serve(self.rfile.read(int(self.headers.get("Content-Length", 0))))

            def _serve(self, body: bytes) -> None:
                path = self.path.partition("?")[0]
                fake.asked.append((self.command, self.path, body))
                answer: Any = fake.answers.get(f"{self.command} {path}")
                if callable(answer):
                    answer = answer(body)
                if answer is None:
                    error = {"code": "NOT_FOUND", "message": f"no resource {path}"}
                    answer = 404, {"error": error}
                if isinstance(answer, bytes):
                    status, raw = 200, answer
                else:
                    status, raw = answer[0], json.dumps(answer[1]).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                for name, value in fake.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(raw)))
                with suppress(ConnectionError):  # who asked has gone
                    self.end_headers()
                    self.wfile.write(raw)

            def log_message(self, format: str, *args: Any) -> None:
                """Tests want no access log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
