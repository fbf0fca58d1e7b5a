"""The thesis's HTTP baseline: a CherryPy server of its own process, that sends back what it gets
(section 4.1.2) or serves the whole model (section 4.2.2).
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import cherrypy
import numpy as np
import torch
from cheroot import wsgi

from blockflow.bench.closing import Closing
from blockflow.bench.in_process import Chain, Pipeline, load
from blockflow.bench.other_process import OtherProcess, Say
from blockflow.core.errors import make_error

BINARY, TEXT = "application/octet-stream", "application/json"

_WAIT_S = 300
_THREADS = 10
"""CherryPy's own default."""


class App:
    """What the server serves.

    Args:
        pipeline: the whole model; None for a server that only sends back.
    """

    def __init__(self, pipeline: Pipeline | None) -> None:
        self._pipeline = pipeline
        self._one_at_a_time = threading.Lock()

    @cherrypy.expose  # type: ignore[untyped-decorator]
    def default(self, what: str) -> bytes:
        """``/string``, ``/json`` and ``/tensor`` send their body back; ``/infer`` is the model."""
        body = _body()
        match what:
            case "string":
                return body.decode().encode()
            case "json":
                return json.dumps(json.loads(body)).encode()
            case "tensor":
                return torch.frombuffer(bytearray(body), dtype=torch.uint8).numpy().tobytes()
            case "infer" if self._pipeline is not None:
                return self._infer(self._pipeline, body)
        raise cherrypy.HTTPError(404)

    def _infer(self, pipeline: Pipeline, body: bytes) -> bytes:
        """The model's output for the tensor in the body: its bytes, or nested lists as JSON."""
        spec = pipeline.input
        text = cherrypy.serving.request.headers.get("Content-Type") == TEXT
        if text:
            x = np.asarray(json.loads(body), dtype=spec.dtype)
        else:
            shape = (-1, *spec.resolve({"rows": 1})[1:])
            x = np.frombuffer(bytearray(body), dtype=spec.dtype).reshape(shape)
        with self._one_at_a_time, torch.inference_mode():
            y = pipeline.infer(x)
        return json.dumps(y.tolist()).encode() if text else y.tobytes()


def _body() -> bytes:
    request = cherrypy.serving.request
    return bytes(request.rfile.read(int(request.headers["Content-Length"])))


def make_server(app: App) -> wsgi.Server:
    """Bound to a free port of this machine."""
    config = {"/": {"request.process_request_body": False}}
    served = cherrypy.Application(app, "", config)
    served.log.screen = False
    for logger in (served.log.error_log, served.log.access_log):
        logger.setLevel(logging.CRITICAL)
    server = wsgi.Server(
        ("127.0.0.1", 0),
        served,
        numthreads=_THREADS,
        timeout=_WAIT_S,  # others take their turns before the connection is used again
        shutdown_timeout=1,
    )
    server.prepare()
    return server


def obey(orders: Iterator[dict[str, Any]], say: Say) -> None:
    """In the other process: serve until the orders end."""
    order: Mapping[str, Any] = next(orders)
    with torch.inference_mode():
        pipeline = load(order) if order else None
    server = make_server(App(pipeline))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    say({"port": server.bind_addr[1]})
    for _ in orders:
        pass
    server.stop()


class HttpServer(OtherProcess):
    """The server's process.

    Args:
        chain: the whole model, block by block; None for a server that only sends back.
    """

    def __init__(self, chain: Chain | None = None) -> None:
        order = {} if chain is None else chain.order()
        super().__init__("blockflow.bench.thesis.http_server", order)
        self.port = int(self.ready["port"])


class HttpClient(Closing):
    """POSTs to a :class:`HttpServer`, over one connection or a new one each time.

    Args:
        keep: the connection, from one request to the next.
    """

    def __init__(self, port: int, *, keep: bool = True) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT_S)
        self._keep = keep

    def post(self, path: str, body: bytes | memoryview, kind: str = BINARY) -> bytes:
        """The answer's body.

        Raises:
            BlockFlowError: INTERNAL with the server's status; TIMEOUT; CONNECTION_LOST.
        """
        try:
            self._connection.request("POST", path, body, {"Content-Type": kind})
            response = self._connection.getresponse()
            found = response.read()
        except TimeoutError:
            raise make_error("TIMEOUT", "the HTTP server does not answer", where=path) from None
        except (OSError, http.client.HTTPException) as exc:
            raise make_error("CONNECTION_LOST", f"the HTTP server: {exc!r}", where=path) from exc
        if not self._keep:
            self._connection.close()  # the next request opens one
        if response.status != 200:
            raise make_error("INTERNAL", f"the HTTP server answered {response.status}", where=path)
        return found

    def close(self) -> None:
        self._connection.close()
