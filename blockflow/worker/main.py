"""The entry of a worker process: what launchers call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blockflow.core.launchspec import WorkerLaunch
from blockflow.launch.logs import log_to_stderr
from blockflow.launch.process import volunteer
from blockflow.tensormq.agent import lifeline_from_environment
from blockflow.worker.worker import Worker


def run(spec: Mapping[str, Any]) -> int:
    """Be the worker of ``spec`` (:meth:`WorkerLaunch.to_dict`); returns its exit status."""
    launch = WorkerLaunch.from_dict(spec)
    log_to_stderr(launch.name)
    volunteer()
    return Worker(launch, lifeline_from_environment()).run()
