"""Remote: the system under test as a process of its own (``blockflow up``), asked by REST.

It looks like a :class:`~blockflow.control.system.System` as far as faults and their judge need one,
but its control plane can be killed.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from blockflow.bench.demo.server import Server
from blockflow.bench.fuzz.run import JsonRest
from blockflow.control.update import Kind
from blockflow.core.errors import BlockFlowError, SystemError_

_UPDATE_S = 300.0
_END_S = 60.0


class RemoteCommands:
    """What is asked of the control plane.

    Every method raises SystemError_ NOT_RUNNING while there is no control plane, and another
    BlockFlowError when it refuses.
    """

    def __init__(self, server: Server) -> None:
        self._server = server

    def status(self) -> dict[str, Any]:
        return dict(self.get("/v1/status"))

    def health(self) -> dict[str, Any]:
        """``ready`` and ``reasons``; not ready without a control plane."""
        try:
            return self.status()
        except SystemError_ as e:
            return {"ready": False, "reasons": [e.message]}

    def workers(self) -> list[dict[str, Any]]:
        return list(self.get("/v1/workers")["workers"])

    def worker(self, name: str) -> dict[str, Any]:
        return dict(self.get(f"/v1/workers/{name}"))

    def template_pid(self) -> int:
        return int(self.status()["control"]["template"]["pid"] or 0)

    def operate(self, kind: Kind, block: str) -> None:
        self.post(f"/v1/blocks/{block}/{kind}")

    def get(self, path: str) -> Any:
        try:
            return self._server.rest.get(path)
        except (OSError, http.client.HTTPException) as e:
            raise SystemError_("NOT_RUNNING", f"GET {path}: {e!r}") from e

    def post(self, path: str, body: Any = None) -> Any:
        try:
            return self._server.rest.post(path, body, timeout_s=_UPDATE_S)
        except (OSError, http.client.HTTPException) as e:
            raise SystemError_("NOT_RUNNING", f"POST {path}: {e!r}") from e


class RemoteSystem:
    """``blockflow up`` over the blocks and the state in ``folder``; a context manager.

    Attributes:
        exit_status: after its end; None: it had to be ended by force.
    """

    def __init__(self, folder: Path) -> None:
        self.exit_status: int | None = None
        self._server = Server(folder / "blocks", folder, JsonRest)
        self.commands = RemoteCommands(self._server)

    @property
    def client_endpoint(self) -> str:
        return self._server.client_address

    @property
    def pid(self) -> int:
        """Of the process that the user has started; all others are below it."""
        return self._server.pid

    @property
    def run_dir(self) -> Path:
        return self._server.run_dir

    def apply(self, topology: Mapping[str, Any], *, wait: bool = True) -> None:
        """Send a system update, and wait for its end unless told otherwise."""
        self.commands.post(f"/v1/system-update?wait={str(wait).lower()}", topology)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            process = psutil.Process(self.pid)
            self.commands.post("/v1/shutdown")
            self.exit_status = process.wait(_END_S)
        except (BlockFlowError, psutil.Error):  # it is gone, or does not end
            self.exit_status = None
        finally:
            self._server.stop()
