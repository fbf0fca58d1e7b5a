"""Entry of the Dispatcher process."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Mapping
from typing import Any

from blockflow import __version__
from blockflow.core.errors import BlockFlowError
from blockflow.core.launchspec import DispatcherLaunch
from blockflow.core.scarcity import failure
from blockflow.dispatcher.monitor import Snapshot
from blockflow.dispatcher.resources import remove_files
from blockflow.dispatcher.server import DispatcherServer
from blockflow.launch.logs import log_to_stderr
from blockflow.tensormq.agent import ControlAgent, Mailbox, lifeline_from_environment
from blockflow.tensormq.collector import begin_collector
from blockflow.tensormq.sockets import new_context
from blockflow.wire.control import ControlMessage, Hello, Ready, StartFailed

_LOG = logging.getLogger("blockflow.dispatcher")

EXIT_OK = 0
EXIT_FAILED = 1


def run(spec: Mapping[str, Any]) -> int:
    """Be the Dispatcher until Stop or SIGTERM.

    Args:
        spec: :meth:`DispatcherLaunch.to_dict`.

    Returns:
        Exit status: 0 after Stop, 1 when it could not start or a defect ended it.
    """
    launch = DispatcherLaunch.from_dict(spec)
    log_to_stderr(launch.name)
    context = new_context()
    mailbox: Mailbox[ControlMessage | Snapshot] = Mailbox()
    server: DispatcherServer | None = None
    agent = ControlAgent(
        endpoint=launch.controller,
        incarnation=launch.incarnation,
        on_message=mailbox.put,
        state=lambda: server.state if server else "starting",
        on_orphaned=lambda: remove_files(launch),
        lifeline_fd=lifeline_from_environment(),
        context=context,
    )
    agent.stop_by_signals()
    agent.start()
    agent.send(Hello("dispatcher", launch.name, launch.incarnation, os.getpid(), __version__))
    status, ready = EXIT_FAILED, False
    try:
        begin_collector()
        server = DispatcherServer(launch, context, mailbox, agent.send, heard=agent.heard)
        server.begin()
        agent.send(Ready(launch.incarnation, server.endpoint, server.client_endpoints))
        ready = True
        # What exists now lives as long as the process: no collection needs to look at it again.
        gc.collect()
        gc.freeze()
        server.run(lambda: agent.signalled)
        status = EXIT_OK
    except Exception as exc:
        if ready:
            _LOG.exception("the Dispatcher ends by a defect")
        else:
            error = exc if isinstance(exc, BlockFlowError) else _defect(exc)
            _LOG.error("%s", error, exc_info=error is not exc)
            agent.send(StartFailed(launch.incarnation, error.to_dict()))
    finally:
        if server is not None:
            server.close()
        agent.close()
        mailbox.close()
        context.term()  # replies that are still in a queue leave now, or after a second are lost
    return status


def _defect(exc: Exception) -> BlockFlowError:
    return failure(exc, f"{type(exc).__name__} at start: {exc}", "dispatcher")
