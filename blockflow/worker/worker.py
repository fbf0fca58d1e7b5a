"""Worker: startup, running, termination; its data thread's loop (thesis, section 3.6.1).

Four threads, and one for each lane beyond the first: *engine* loads and computes, and receives and
sends what it computes (:mod:`blockflow.worker.turns`); a *lane* computes beside it; *data*, the
process's main thread, obeys the control messages, and receives while the engine thread computes;
*control* answers pings and watches the lifeline (:class:`blockflow.tensormq.agent.ControlAgent`);
*monitor* samples KPIs. They speak with the data thread by its mailbox.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import blockflow
from blockflow.batching.shares import read_shares
from blockflow.core.errors import BlockFlowError, RequestError, SystemError_
from blockflow.core.launchspec import WorkerLaunch
from blockflow.core.profile import StageProfile
from blockflow.core.routing import RouteTable
from blockflow.core.scarcity import failure, named
from blockflow.launch.process import EXIT_START_FAILED, Adoption
from blockflow.launch.refused import thread_refused
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.agent import ControlAgent, Mailbox
from blockflow.tensormq.janitor import remove_leavings
from blockflow.tensormq.sockets import new_context
from blockflow.wire import control
from blockflow.worker.monitor import AskKpi, Snapshot
from blockflow.worker.parts import Parts, Wake, ended_by, open_parts
from blockflow.worker.runner import Loaded, release_load_memory
from blockflow.worker.turns import NEVER_NS, WatchedSockets

_LOG = logging.getLogger("blockflow.worker")

EXIT_OK = 0
EXIT_STUCK = 3
"""A forward exceeded its block's time-out: a thread cannot be interrupted, so the process ends."""

_STOP_S = 30.0
"""How long a running batch may take to finish after Stop (its block's time-out may be shorter)."""
_END_S = 2.0
"""How long the next hops have to read the last outputs, and the engine to free its memory; and the
other lanes to finish when a forward is stuck."""
_SELDOM_NS = 1_000_000_000
"""Who wakes no more often than this, for nothing, costs nothing."""


class Worker:
    """One worker process; :meth:`run` is its life.

    Args:
        launch: its birth certificate.
        lifeline_fd: read end of the manager's pipe, None without.
    """

    def __init__(self, launch: WorkerLaunch, lifeline_fd: int | None) -> None:
        self._launch = launch
        self._run_dir = Path(launch.run_dir)
        self._mailbox: Mailbox[Any] = Mailbox()
        self._state = "loading"
        self._context = new_context()
        self._agent = ControlAgent(
            endpoint=launch.controller,
            incarnation=launch.incarnation,
            on_message=self._mailbox.put,
            state=lambda: self._state,
            on_orphaned=self._remove_files,
            lifeline_fd=lifeline_fd,
            context=self._context,
        )
        self._watched = WatchedSockets()
        self._watched.hear(self._mailbox.fileno())
        self._engine_thread: threading.Thread | None = None
        self._lanes: list[threading.Thread] = []
        self._begin = threading.Event()
        self._loaded: Loaded | None = None
        self._adoption = Adoption()
        self._drain_asked = False
        self._stopping = False

    # --- life ------------------------------------------------------------------------------------

    def run(self) -> int:
        """Live until Stop or SIGTERM; returns the exit status."""
        self._agent.stop_by_signals()
        launch = self._launch
        self._agent.start()
        self._agent.send(
            control.Hello(
                "worker", launch.name, launch.incarnation, os.getpid(), blockflow.__version__
            )
        )
        status = EXIT_OK
        parts: Parts | None = None
        try:
            parts = open_parts(
                launch,
                self._context,
                self._watched,
                self._mailbox.put,
                self._agent.send,
            )
            if self._load(parts):
                self._ready(parts)
                status = self._serve(parts)
        except BlockFlowError as exc:
            if self._state != "loading":
                raise  # of a device that is lost, say: its memory is gone, nobody waits for it
            _LOG.error("start-up of %s failed: %s", launch.name, exc)
            self._agent.send(control.StartFailed(launch.incarnation, named(exc).to_dict()))
            status = EXIT_START_FAILED
        except Exception as exc:
            if self._state != "loading":
                raise
            error = failure(exc, f"{type(exc).__name__} at start: {exc}", launch.name)
            defect = error.code == "INTERNAL"
            _LOG.error("start-up of %s failed: %s", launch.name, error, exc_info=defect)
            self._agent.send(control.StartFailed(launch.incarnation, error.to_dict()))
            status = EXIT_START_FAILED
        self._terminate(parts, status)
        return status

    def _load(self, parts: Parts) -> bool:
        """Startup: load and warm up while control messages are served; False when told to stop.

        Raises:
            BlockFlowError: why a block cannot be loaded.
        """
        thread = threading.Thread(
            target=self._engine_life, args=(parts,), name="bf-engine", daemon=True
        )
        thread.start()
        self._engine_thread = thread
        while self._loaded is None and not self._stopping:
            self._watched.epoll.poll()
            self._read_mailbox(parts)
        if self._loaded is not None and self._loaded.error is not None:
            raise self._loaded.error
        return not self._stopping

    def _ready(self, parts: Parts) -> None:
        launch, loaded = self._launch, self._loaded
        if loaded is None:
            return
        parts.monitor.start(launch.monitor_hz)
        self._state = "draining" if self._drain_asked else "ready"
        self._agent.send(
            control.Ready(
                launch.incarnation, parts.endpoint, load_ms=loaded.load_ms, warm_ms=loaded.warm_ms
            )
        )

    def _engine_life(self, parts: Parts) -> None:
        """The engine thread, from the first load to the last forward."""
        try:
            # Inference mode is a property of a thread: entered once, not per batch.
            with torch.inference_mode(), parts.memory.engine_scope():
                self._mailbox.put(parts.runner.load(BlockRepository(Path(self._launch.repository))))
                self._begin.wait()
                parts.turns.serve()
                parts.runner.close()
        except BaseException as exc:  # a defect: it ends the process, not just this thread
            self._mailbox.put(ended_by(exc))

    def _open_lanes(self, parts: Parts) -> None:
        """A thread for each lane; those of lanes that are given up stay asleep. Where the machine
        has no room for one, the worker serves with those it has."""
        while len(self._lanes) < parts.executor.lanes - 1:
            name = f"bf-lane{len(self._lanes) + 2}"
            thread = threading.Thread(target=self._lane_life, args=(parts,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:
                if not thread_refused(exc):
                    raise
                lanes = parts.executor.lanes = len(self._lanes) + 1
                _LOG.warning("no thread for a further lane (%s): %d from now on", exc, lanes)
                return
            self._lanes.append(thread)
            parts.runner.widen(len(self._lanes) + 1)

    def _lane_life(self, parts: Parts) -> None:
        """The thread of a further lane."""
        try:
            parts.turns.lend()
        except BaseException as exc:  # as in the engine thread
            self._mailbox.put(ended_by(exc))

    def _serve(self, parts: Parts) -> int:
        """Running: returns the exit status once there is nothing more to do."""
        executor, push, turns = parts.executor, parts.push, parts.turns
        end_ns, stuck = 0, False
        limits = [s.timeout_ms * 1_000_000 for s in self._launch.stages if s.timeout_ms]
        shortest_ns = min(limits, default=0)
        with turns.lock:
            self._begin.set()
            while True:
                now = time.monotonic_ns()
                self._open_lanes(parts)
                if executor.give_up_overdue(now):
                    # What the other lanes compute is nobody's fault: it may still be done.
                    stuck = self._stopping = True
                    end_ns = now + int(_END_S * 1e9)
                if self._stopping:
                    turns.pause()
                    end_ns = end_ns or now + int(_STOP_S * 1e9)
                    if not executor.busy:
                        return EXIT_STUCK if stuck else EXIT_OK
                    if now > end_ns:
                        return EXIT_STUCK
                if executor.busy or turns.engaged:
                    turns.meanwhile(now)
                if self._drain_asked and executor.idle and not push.pending():
                    self._drain_asked = False
                    version = parts.delivery.routes.version
                    self._agent.send(control.Drained(self._launch.incarnation, version))
                turns.attentive = self._stopping or self._drain_asked
                until = end_ns or NEVER_NS
                if executor.busy or turns.engaged:
                    until = min(until, turns.next_wake_ns())
                elif shortest_ns >= _SELDOM_NS:  # or each forward would wake who sleeps for ever
                    until = min(until, now + shortest_ns)
                turns.rest(until)
                if self._mailbox:
                    self._read_mailbox(parts)
                push.flush()

    def _terminate(self, parts: Parts | None, status: int) -> None:
        """Answer for everything that is here, then leave nothing behind."""
        self._state, self._stopping = "stopping", True
        if parts is not None:
            turns = parts.turns
            with turns.lock:
                turns.close()
                parts.executor.abandon()  # its memory goes before it is done
                ended_here = RequestError("WORKER_LOST", "the worker has ended")
                parts.executor.refuse_all(ended_here)  # a full inbox would read nothing
                while turns.receive():  # an inbox at a time
                    parts.executor.refuse_all(ended_here)
                self._await_next_hops(parts)
            self._begin.set()
            ended = self._join_engine(_END_S if status == EXIT_OK else 0.0)
            parts.pull.close(0)
            parts.monitor.close()
            parts.delivery.close()
            parts.memory.close()
            if ended:
                turns.release()
        self._remove_files()
        self._agent.close()
        self._context.term()  # waits for what was sent to leave; LINGER bounds that
        self._watched.epoll.close()
        self._mailbox.close()

    def _join_engine(self, timeout_s: float) -> bool:
        """Wait for the threads that compute to end; False when one is stuck in a computation."""
        if self._engine_thread is None:
            return True
        end = time.monotonic() + timeout_s
        threads = [self._engine_thread, *self._lanes]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _await_next_hops(self, parts: Parts) -> None:
        """Give the next hops time to read the last outputs: the arena goes with this process."""
        end = time.monotonic() + _END_S
        slots = parts.memory.slots
        while time.monotonic() < end:
            parts.push.flush()
            if slots is not None:
                slots.sweep()
            if not parts.push.pending() and (slots is None or not slots.outstanding()):
                return
            self._watched.epoll.poll(0.001)
            for message in self._mailbox.drain():
                if isinstance(message, control.PeerGone):  # that one reads nothing any more
                    self._obey(parts, message)

    def _remove_files(self) -> None:
        remove_leavings(self._run_dir, self._launch.incarnation)

    # --- the data thread's inputs ----------------------------------------------------------------

    def _read_mailbox(self, parts: Parts) -> None:
        for message in self._mailbox.drain():
            match message:
                case Loaded():
                    self._loaded = message
                case Wake():
                    pass
                case Exception():
                    raise message
                case AskKpi():
                    parts.monitor.answer(self._snapshot(parts))
                case control.Ping():
                    self._agent.heard(message.seq)
                    self._adoption.check()
                    parts.ebb(time.monotonic_ns())
                case _:
                    self._obey(parts, message)
                    parts.turns.poke()  # slots, policies, routes: there may be work now

    def _obey(self, parts: Parts, message: control.ControlMessage) -> None:
        match message:
            case control.Routes():
                self._set_routes(parts, message)
            case control.PeerGone():
                parts.delivery.peer_gone(message.incarnation)
                parts.memory.consumer.peer_gone(message.incarnation)
            case control.Drain():
                self._drain_asked = True
                self._state = "draining" if self._loaded else self._state
            case control.Undrain():
                self._drain_asked = False
                self._state = "ready" if self._loaded else self._state
            case control.Stop():
                self._stopping = True
            case control.Monitor():
                parts.monitor.set_rate(message.hz)
            case control.SetPolicy():
                self._set_policy(parts, message)
            case control.SetThreads():
                # Fewer at once; more when their threads are set, so that they never outnumber both.
                parts.executor.lanes = min(parts.executor.lanes, message.lanes)
                parts.turns.later(lambda: self._set_threads(parts, message))
            case _:
                _LOG.warning("%s is not for %s", type(message).__name__, self._launch.name)

    def _set_policy(self, parts: Parts, message: control.SetPolicy) -> None:
        """Policies count on what the update was accepted for, not on the threads of this moment."""
        scheduler, stage = parts.scheduler, message.stage
        if (known := scheduler.facts.get(stage)) is None:
            _LOG.error("there is no stage %d here to have another policy", stage)
            return
        try:
            told = StageProfile.from_dict(message.profile) if message.profile else None
            same = known.profile if known.threads == message.threads else None
            facts = replace(known, threads=message.threads, profile=told or same)
            scheduler.set_policy(stage, message.policy, time.monotonic_ns(), facts)
        except Exception as exc:  # its own __init__ may raise anything
            _LOG.error("policy of stage %d stays: %s", stage, exc)
            what = f"{type(exc).__name__}: {exc}"
            error = exc if isinstance(exc, BlockFlowError) else SystemError_("INTERNAL", what)
            self._agent.send(
                control.PolicyRefused(
                    self._launch.incarnation,
                    stage,
                    message.epoch,
                    dict(scheduler.policy(stage)),
                    error.to_dict(),
                )
            )

    def _set_threads(self, parts: Parts, message: control.SetThreads) -> None:
        """In the engine thread: the pools of torch belong to the thread that computes."""
        with parts.turns.lock:  # an earlier order may have been carried out since it came
            parts.executor.lanes = min(parts.executor.lanes, message.lanes)
        parts.runner.set_threads(message.threads)
        with parts.turns.lock:
            if parts.runner.concurrent and parts.runner.threads == message.threads:
                parts.executor.lanes = min(message.lanes, len(self._launch.stages))
        self._mailbox.put(Wake())  # for a lane that has no thread yet

    def _set_routes(self, parts: Parts, message: control.Routes) -> None:
        try:
            table = RouteTable.from_dict(message.table)
        except (KeyError, TypeError, ValueError) as exc:
            _LOG.error("route table refused: %s", exc)
            return
        if table.version < parts.delivery.routes.version:
            return  # overtaken by a newer one
        if table.version and not parts.delivery.routes.version:
            # Until now there was nothing but the readiness probe: neither its figures nor the heap
            # that its forward has left shall stay.
            parts.memory.forget_figures()
            parts.turns.later(release_load_memory)
        parts.delivery.set_routes(table)
        parts.scheduler.set_shares(read_shares(table.shares), time.monotonic_ns())
        self._agent.send(control.RoutesApplied(self._launch.incarnation, table.version))

    def _snapshot(self, parts: Parts) -> Snapshot:
        counters = {
            "malformed": parts.intake.malformed,
            "undeliverable": parts.delivery.undeliverable,
            "unsent": parts.push.pending(),
            "threads": parts.runner.threads,
            "lanes": parts.executor.lanes,
            "withdrawn": parts.executor.withdrawn,
            "backlog_copies": parts.executor.backlog.copies,
        }
        return Snapshot(parts.sampler.sample(time.monotonic_ns()), counters)
