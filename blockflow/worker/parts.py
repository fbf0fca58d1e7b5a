"""Parts: what a worker is made of once it has its memory and its socket, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from blockflow.batching.facts import StageFacts
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError
from blockflow.core.launchspec import WorkerLaunch
from blockflow.launch.cgroup import memory_left, memory_rooms
from blockflow.launch.environment import give_memory_back
from blockflow.tensormq.atwork import AtWork
from blockflow.tensormq.collector import begin_collector
from blockflow.tensormq.curve import Gatekeeper, LinkGuard
from blockflow.tensormq.memory import TensorMemory, open_memory
from blockflow.tensormq.push import PushCache
from blockflow.tensormq.sockets import bind_pull
from blockflow.tensormq.weights import WeightFiles
from blockflow.wire.control import ControlMessage
from blockflow.worker.delivery import Delivery
from blockflow.worker.engines import make_engines
from blockflow.worker.executor import Executor
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.intake import Intake
from blockflow.worker.monitor import AskKpi, KpiMonitor
from blockflow.worker.runner import Runner
from blockflow.worker.sampling import StageSampler
from blockflow.worker.scheduler import Scheduler
from blockflow.worker.ticket import Batch
from blockflow.worker.turns import Turns, WatchedSockets


class Wake:
    """Mail that only wakes the data thread: look again at what there is to do, and until when."""


def ended_by(exc: BaseException) -> Exception:
    """What a thread that computes was ended by, for the thread that ends the process. A library may
    raise SystemExit and the like, which would end that thread alone, or the process as if all were
    well."""
    if isinstance(exc, Exception):
        return exc
    return RuntimeError(f"{type(exc).__name__}: {exc} has ended a thread that computes")


@dataclass(slots=True)
class Parts:
    """All but the threads; ``endpoint`` is the data socket's address."""

    pull: zmq.Socket[bytes]
    endpoint: str
    memory: TensorMemory
    push: PushCache
    delivery: Delivery
    intake: Intake
    runner: Runner
    scheduler: Scheduler
    executor: Executor
    turns: Turns
    monitor: KpiMonitor
    sampler: StageSampler

    def ebb(self, now_ns: int) -> None:
        """Give back memory that a burst has left; to be called now and then."""
        self.memory.ebb(now_ns)
        self.runner.pool.ebb(now_ns)


def open_parts(
    launch: WorkerLaunch,
    context: zmq.Context[zmq.Socket[bytes]],
    watched: WatchedSockets,
    mail: Callable[[Any], None],
    tell: Callable[[ControlMessage], None],
) -> Parts:
    """Make everything but the blocks, which are loaded by the engine thread.

    Args:
        launch: the worker's birth certificate.
        context, watched: of the data thread.
        mail: puts something into the data thread's mailbox.
        tell: sends to the Controller.

    Raises:
        BlockFlowError: what cannot be had; files are left to the caller
            (:func:`~blockflow.tensormq.janitor.remove_leavings`), nothing else is.
        zmq.ZMQError: no descriptor is left for what sends whole tensors.
    """
    run_dir = Path(launch.run_dir)
    if launch.mode != "tensormq":  # else few send whole tensors, or none: it takes 7 descriptors
        begin_collector()
    failpoints = FailPoints.from_environment(run_dir, launch.stages)
    scheduler = Scheduler(
        {s.stage: s.policy for s in launch.stages},
        {s.stage: StageFacts.of(s, s.threads or launch.threads) for s in launch.stages},
        widths=lambda stage: stages[stage].width,
    )
    memory = open_memory(
        run_dir,
        launch.incarnation,
        device=launch.device,
        mode=launch.mode,
        arena_bytes=launch.arena_bytes,
        slots=max(1, launch.slots),
        rooms=memory_rooms,
        on_broken=lambda why: mail(RuntimeError(why)),
    )
    try:
        most = max((s.max_rows for s in launch.stages), default=1)  # a request has a row at least
        most_lanes = min(max(1, len(launch.stages)), limits.MAX_LANES)
        if memory.device is not None:  # one lane, but batches are at work until the device is done
            most_lanes = 2 * memory.device.queue.depth
        at_work = AtWork.create(run_dir, launch.incarnation, most, most_lanes)
        weights = (
            WeightFiles(run_dir, give_memory_back, memory_left) if launch.shared_weights else None
        )
        stages = make_engines(launch.stages, memory.engine_device, launch.threads, weights)
        link = LinkGuard(Gatekeeper(context), run_dir)
        pull, endpoint = bind_pull(
            context,
            launch.transport,
            run_dir,
            launch.incarnation,
            protect=link.bind(launch.transport),
        )
    except BlockFlowError:
        memory.close()
        raise
    push = PushCache(context, watched, protect=link.connect)
    delivery = Delivery(
        launch.incarnation,
        launch.mode,
        stages.keys(),
        push,
        memory.slots,
        memory.frames,
        memory.own_copy,
    )
    intake = Intake(stages, memory.consumer)
    runner = Runner(stages, failpoints, memory, at_work)
    lanes = min(launch.lanes, len(stages)) if runner.concurrent else 1
    executor = Executor(stages, scheduler, intake, delivery, failpoints, lanes)
    turns = Turns(pull, watched, executor, runner, lambda: mail(Wake()))

    def landed(batch: Batch) -> None:
        try:
            turns.landed(batch)
        except BaseException as exc:  # as in the engine thread: it ends the process, not a batch
            mail(ended_by(exc))

    runner.landed = landed
    sampler = StageSampler(stages, scheduler, executor.accounts)
    monitor = KpiMonitor(
        launch.incarnation,
        {n: s.spec for n, s in stages.items()},
        runner.copied,
        launch.device,
        memory,
        sampler.mark,
        lambda: mail(AskKpi()),
        tell,
    )
    return Parts(
        pull,
        endpoint,
        memory,
        push,
        delivery,
        intake,
        runner,
        scheduler,
        executor,
        turns,
        monitor,
        sampler,
    )
