"""Parts: what a worker is made of once it has its memory and its socket, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from blockflow.core.errors import BlockFlowError
from blockflow.core.launchspec import WorkerLaunch
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.janitor import remove_leavings
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.shm import ShmConsumer, ShmProducer
from blockflow.tensormq.sockets import bind_pull
from blockflow.wire.control import ControlMessage
from blockflow.worker.delivery import Delivery
from blockflow.worker.executor import Executor
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.intake import Intake
from blockflow.worker.monitor import AskKpi, KpiMonitor
from blockflow.worker.runner import Computed, Loaded, Runner, make_engines
from blockflow.worker.scheduler import Scheduler


@dataclass(slots=True)
class Parts:
    """All but the threads; ``endpoint`` is the data socket's address."""

    pull: zmq.Socket[bytes]
    endpoint: str
    shm: ShmProducer | None
    push: PushCache
    delivery: Delivery
    consumer: ShmConsumer
    intake: Intake
    runner: Runner
    scheduler: Scheduler
    executor: Executor
    monitor: KpiMonitor


def open_parts(
    launch: WorkerLaunch,
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
    from_engine: Callable[[Loaded | Computed], None],
    mail: Callable[[Any], None],
    tell: Callable[[ControlMessage], None],
) -> Parts:
    """Make everything but the blocks, which are loaded by the engine thread.

    Args:
        launch: the worker's birth certificate.
        context, poller: of the data thread.
        from_engine: takes what the engine thread has done, in that thread.
        mail: puts something into the data thread's mailbox.
        tell: sends to the Controller.

    Raises:
        BlockFlowError: what cannot be had; nothing is left behind.
    """
    run_dir = Path(launch.run_dir)
    failpoints = FailPoints.from_environment(run_dir, launch.stages)
    stages = make_engines(launch.stages, launch.device, launch.threads)
    scheduler = Scheduler({s.stage: s.policy for s in launch.stages})
    slots = max(1, launch.slots)
    shm: ShmProducer | None = None
    if launch.arena_bytes > 0 and launch.mode == "tensormq":
        shm = ShmProducer(Arena.create(run_dir, launch.incarnation, launch.arena_bytes, slots))
    try:
        pull, endpoint = bind_pull(context, launch.transport, run_dir, launch.incarnation)
    except BlockFlowError:
        remove_leavings(run_dir, launch.incarnation)
        raise
    push = PushCache(context, poller)
    delivery = Delivery(
        launch.incarnation, launch.mode, stages.keys(), push, shm, InlineProducer(slots)
    )
    consumer = ShmConsumer(run_dir)
    intake = Intake(stages, consumer)
    runner = Runner(stages, from_engine, failpoints)
    executor = Executor(stages, scheduler, intake, runner, delivery, failpoints)
    monitor = KpiMonitor(
        launch.incarnation,
        {s.stage: s for s in launch.stages},
        launch.device,
        shm,
        lambda: mail(AskKpi()),
        tell,
    )
    return Parts(
        pull, endpoint, shm, push, delivery, consumer, intake, runner, scheduler, executor, monitor
    )
