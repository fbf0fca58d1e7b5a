"""What is left in a process of a REST server that has ended: nothing."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import cherrypy
import httpx

from blockflow.control.rest.server import RestServer


class Commands:
    """Of a system that is alive; to be seen to go."""

    def epoch(self) -> dict[str, Any]:
        return {}


def served_once() -> weakref.ref[Commands]:
    """A server's whole life; what it had served."""
    commands: Any = Commands()
    server = RestServer(commands, "", lambda: None, host="127.0.0.1", port=0)
    server.start()
    try:
        assert httpx.get(f"{server.url}/v1/health/live").status_code == 200
    finally:
        server.stop()
    return weakref.ref(commands)


def listed() -> list[int]:
    """Servers and logs that cheroot, CherryPy and logging know of, in the whole process."""
    figures: dict[str, Any] = logging.statistics  # type: ignore[attr-defined]
    listeners = cherrypy.engine.listeners["graceful"]
    return [len(figures), len(listeners), len(logging.Logger.manager.loggerDict)]


def test_a_server_that_has_ended_keeps_nothing_of_its_system() -> None:
    """A process that uses systems one after the other would hold them all."""
    served_once()  # what is imported late has loggers of its own
    before = listed()
    of_system = served_once()
    gc.collect()
    assert of_system() is None and listed() == before
