"""Views: the Brain's state and the KPIs as the JSON documents that REST and the CLI show. Pure."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from itertools import chain
from typing import Any

from blockflow.control.brain import Brain
from blockflow.control.crashes import CrashBook, crash_record
from blockflow.control.fleet import Crash, Life, Replica
from blockflow.control.kpis import PROCESS_NOW, KpiBook, Sample, aggregate, totals, without_now
from blockflow.control.routes import served_contract
from blockflow.core.lifecycle import State
from blockflow.core.topology import Topology

_OLD_S = 5.0
"""Rates are of the last seconds: of an older sample they say nothing of now."""


class Views:
    """Documents of one moment.

    Args:
        brain, kpis: what is shown.
        pings: incarnation -> last round trip in ms.
        now_ns: monotonic clock.
        crashes: the book of them; None = there is none, and what replicas know of is shown.
    """

    def __init__(
        self,
        brain: Brain,
        kpis: KpiBook,
        pings: dict[int, float],
        now_ns: int,
        crashes: CrashBook | None = None,
    ) -> None:
        self._brain = brain
        self._realm = brain.realm
        self._crew = brain.crew
        self._kpis = kpis
        self._pings = pings
        self._now_ns = now_ns
        self._book = crashes
        self._states: dict[str, str] = {}

    @cached_property
    def _hosts(self) -> dict[str, list[Replica]]:
        return self._crew.fleet.hosts()

    @cached_property
    def _tasks_of(self) -> dict[str, list[str]]:
        """block -> the tasks that visit it. There may be thousands of both."""
        topology, found = self._realm.topology, dict[str, list[str]]()
        for task, spec in topology.tasks.items() if topology is not None else ():
            for block in dict.fromkeys(chain.from_iterable(spec.paths)):
                found.setdefault(block, []).append(task)
        return found

    # --- system ---------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        reasons = self._realm.reasons_not_ready()
        if self._brain.stopping:
            reasons.insert(0, "the system is shutting down")
        return {"ready": not reasons, "reasons": reasons}

    def state(self) -> str:
        """One word: stopping, empty, starting, degraded or ready."""
        if self._brain.stopping:
            return "stopping"
        if not self._crew.dispatcher_ready:
            return "starting" if self._crew.dispatcher_crash is None else "degraded"
        if self._realm.topology is None:
            return "empty" if self._realm.unrestored is None else "degraded"
        if not self._realm.reasons_not_ready():
            return "ready"
        current = self._brain.runner.current
        restoring = current is not None and current.restores
        return "starting" if restoring else "degraded"

    def epoch(self) -> dict[str, Any]:
        publication = self._realm.publication
        return {
            "epoch": self._realm.epoch,
            "routes": self._realm.version,
            "routes_in_force": publication.flipped,
        }

    def topology(self) -> dict[str, Any]:
        topology = self._realm.topology
        return {
            "epoch": self._realm.epoch,
            "topology": topology.extended() if topology is not None else None,
            "posted": self._realm.posted,
        }

    def updates(self) -> list[dict[str, Any]]:
        """Latest first."""
        found = self._brain.runner.updates
        return [found[i].to_dict(self._now_ns) for i in sorted(found, reverse=True)]

    def warnings(self, *others: str) -> list[str]:
        """What works and should be known nevertheless; empty texts are left out."""
        realm = self._realm
        told = [*realm.notes, *realm.cautions(realm.topology), *realm.policies.refusals()]
        return [*filter(None, others), *told]

    def totals(self) -> dict[str, float]:
        """cpu, memory and slots over workers and Dispatcher."""
        found = (self._process(life) for life in self._crew.lives())
        return totals(p for p in found if p is not None)

    # --- tasks ----------------------------------------------------------------------------------

    def tasks(self) -> list[dict[str, Any]]:
        topology = self._realm.topology
        return [self._task(topology, n) for n in topology.tasks] if topology is not None else []

    def _task(self, topology: Topology, name: str) -> dict[str, Any]:
        known: dict[str, Any] = topology.memo.setdefault("task documents", {})
        if name not in known:  # people look every second, and there may be thousands
            known[name] = self._lasting(topology, name)
        states = ((b, self._state_of(b)) for b in topology.tasks[name].path)
        missing = [block for block, state in states if state not in ("ready", "degraded")]
        return {
            **known[name],
            "available": not missing,
            "missing": missing,
            "kpi": self._task_kpi(name),
        }

    @staticmethod
    def _lasting(topology: Topology, name: str) -> dict[str, Any]:
        """What is said of a task as long as the topology is in force."""
        spec = topology.tasks[name]
        contract = served_contract(topology, name)
        return {
            "name": name,
            "path": list(spec.path),
            "canary": spec.canary.model_dump(mode="json") if spec.canary else None,
            "contract": contract.to_dict(),
            "input": str(contract.input),
            "output": str(contract.output),
            "max_rows": topology.task_rows(name),
            "deadline_ms": spec.deadline_ms,
        }

    def _task_kpi(self, name: str) -> dict[str, Any]:
        life = self._crew.dispatcher
        if life is None:
            return {}
        return self._of_now(life, self._kpis.tasks(life.incarnation).get(name))

    # --- blocks ---------------------------------------------------------------------------------

    def blocks(self) -> list[dict[str, Any]]:
        topology = self._realm.topology
        return [self._block(topology, b) for b in topology.blocks] if topology is not None else []

    def block(self, name: str) -> dict[str, Any]:
        """One block. Raises RepositoryError: UNKNOWN_BLOCK."""
        self._realm.hosts(name)
        return next(b for b in self.blocks() if b["name"] == name)

    def _block(self, topology: Topology, name: str) -> dict[str, Any]:
        spec, info = topology.blocks[name], topology.infos[name]
        hosts = self._hosts.get(name, [])
        kpis = [self._stage_kpi(r.life, r.life.stages[name]) for r in hosts]
        # what a worker says that it runs; until one has spoken, what was asked for
        told = next((k for k in kpis if k.get("engine")), {})
        return {
            "name": name,
            "artifact": spec.artifact,
            "version": info.version,
            "digest": info.digest,
            "format": info.format,
            "state": self._state_of(name),
            "closed": self._realm.closed.get(name),
            "contract": info.contract.to_dict(),
            "input": str(info.contract.input),
            "output": str(info.contract.output),
            "parameters": info.parameters,
            "state_bytes": info.state_bytes,
            "device": spec.device,
            "mode": topology.mode_of(name),
            "engine": told.get("engine", spec.engine),
            "engine_asked": spec.engine,
            "precision": told.get("precision", spec.precision),
            "precision_asked": spec.precision,
            "variants": sorted(info.variants),
            "refused_engines": {k: dict(v.refused) for k, v in info.variants.items() if v.refused},
            "batching": spec.batching.model_dump(mode="json"),
            "threads": spec.threads,
            "lanes": spec.lanes,
            "max_rows": topology.rows_of(name),
            "replicas": spec.replicas,
            "ready": sum(r.life.state is State.READY for r in hosts),
            "workers": [r.name for r in hosts],
            "tasks": list(self._tasks_of.get(name, ())),
            "kpi": aggregate(k for k in kpis if k),
        }

    def _state_of(self, block: str) -> str:
        """Of this moment; all tasks of a trunk ask for it."""
        if block not in self._states:
            self._states[block] = self._block_state(block)
        return self._states[block]

    def _block_state(self, block: str) -> str:
        hosts = self._hosts.get(block, [])
        how = self._realm.closed.get(block)
        if how is not None:
            publication = self._realm.publication
            busy = self._brain.runner.current
            under_way = busy is not None and busy.block == block
            settled = publication.drained >= self._realm.version and not under_way
            if how == "drain":
                return "drained" if settled else "draining"
            return "stopped" if settled else "stopping"
        states = [r.state for r in hosts]
        if states and all(s == "ready" for s in states):
            return "ready"
        if "ready" in states:
            return "degraded"
        for state in ("restarting", "proving", "loading", "launching", "failed"):
            if state in states:
                return state if state in ("restarting", "failed") else "starting"
        return states[0] if states else "missing"

    # --- workers --------------------------------------------------------------------------------

    def workers(self) -> list[dict[str, Any]]:
        """All replicas; those of an update under way and those that leave are among them."""
        return [self._worker(r) for r in self._crew.fleet]

    def worker(self, name: str) -> dict[str, Any] | None:
        """A worker, or the Dispatcher, by name; None when there is none."""
        if name == "dispatcher":
            return self.dispatcher()
        return next((w for w in self.workers() if w["name"] == name), None)

    def dispatcher(self) -> dict[str, Any]:
        life = self._crew.dispatcher
        if life is None:
            return {"name": "dispatcher", "role": "dispatcher", "state": "missing"}
        waiting = self._crew.dispatcher_restart_ns is not None
        sample, tasks = self._sample(life), self._kpis.tasks(life.incarnation)
        return {
            **self._life(life),
            "role": "dispatcher",
            "state": "restarting" if waiting else str(life.state),
            "clients": list(life.endpoints),
            "restarts": self._crew.dispatcher_ledger.total,
            "crash": self._crash(self._crew.dispatcher_crash),
            "crashes": self._crashes(life.name, self._crew.dispatcher_crashes),
            "kpi": {**sample.extra, "tasks": {n: self._of_now(life, k) for n, k in tasks.items()}}
            if sample is not None
            else {},
        }

    def _worker(self, replica: Replica) -> dict[str, Any]:
        spec, life = replica.spec, replica.life
        sample = self._sample(life)
        stages = []
        for stage_plan in spec.stages:
            block = stage_plan.spec.name
            policy = dict(replica.policies.get(block, {}))
            stages.append(
                {
                    "block": block,
                    "stage": life.stages[block],
                    "digest": stage_plan.info.digest,
                    "batching": policy,
                    "kpi": self._stage_kpi(life, life.stages[block]),
                }
            )
        return {
            **self._life(life),
            "role": str(replica.role),
            "state": replica.state,
            "worker": spec.name,
            "blocks": list(spec.blocks),
            "device": spec.device,
            "mode": spec.mode,
            "transport": spec.transport,
            "threads": life.threads,
            "threads_asked": spec.threads or "auto",
            "threads_now": sample.extra.get("threads") if sample is not None else None,
            "lanes": life.lanes,
            "lanes_asked": spec.lanes or "auto",
            "lanes_now": sample.extra.get("lanes") if sample is not None else None,
            "cores": list(spec.cores),
            "restarts": replica.ledger.total,
            "given_up": replica.given_up or None,
            "crash": self._crash(replica.crash),
            "crashes": self._crashes(replica.name, replica.crashes),
            "stages": stages,
        }

    def _life(self, life: Life) -> dict[str, Any]:
        sample = self._sample(life)
        ready = life.ready_ns > 0
        return {
            "name": life.name,
            "incarnation": life.incarnation,
            "pid": (life.pid or None) if not life.reaped else None,
            "endpoint": life.endpoint or None,
            "start_ms": round((life.ready_ns - life.launched_ns) / 1e6, 3) if ready else None,
            "load_ms": life.load_ms,
            "warm_ms": life.warm_ms,
            "probe_ms": round(life.probe_ms, 3),
            "uptime_s": self._age_s(life.ready_ns) if ready and not life.reaped else None,
            "ping_ms": self._pings.get(life.incarnation),
            "kpi_age_s": self._age_s(sample.time_ns) if sample is not None else None,
            "process": self._process(life),
        }

    def _process(self, life: Life) -> dict[str, Any] | None:
        """Its resources, without what an old sample does not tell of the present."""
        sample = self._sample(life)
        if sample is None:
            return None
        process: dict[str, Any] = sample.process
        return process if self._fresh(sample) else without_now(process, PROCESS_NOW)

    def _crash(self, crash: Crash | None) -> dict[str, Any] | None:
        if crash is None:
            return None
        return {"age_s": self._age_s(crash.at_ns), **crash_record(crash)}

    def _crashes(self, name: str, mine: Collection[Crash]) -> list[dict[str, Any]]:
        """The latest of all that had this name, newest first: the same whoever tells of them."""
        if self._book is not None:
            return self._book.latest(name, self._now_ns)
        return [{"age_s": self._age_s(c.at_ns), **crash_record(c)} for c in reversed([*mine])]

    def _age_s(self, time_ns: int) -> float:
        return round((self._now_ns - time_ns) / 1e9, 3)

    def _stage_kpi(self, life: Life, stage: int) -> dict[str, Any]:
        return self._of_now(life, self._kpis.stage(life.incarnation, stage))

    def _of_now(self, life: Life, kpi: Any) -> dict[str, Any]:
        """Figures of a process, without those that its last sample is too old for: the monitor is
        off, or the process says nothing."""
        if not isinstance(kpi, dict):
            return {}
        sample = self._sample(life)
        return kpi if sample is not None and self._fresh(sample) else without_now(kpi)

    def _fresh(self, sample: Sample) -> bool:
        hz = self._crew.hz
        old = max(_OLD_S, 3 / hz) if hz else _OLD_S
        return self._age_s(sample.time_ns) <= old

    def _sample(self, life: Life | None) -> Sample | None:
        return self._kpis.latest(life.incarnation) if life is not None else None
