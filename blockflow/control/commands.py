"""Commands: what people and programs may ask of the control plane, from any thread.

REST and the in-process System are thin layers over this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from blockflow import __version__
from blockflow.control import release
from blockflow.control.accept import Acceptance, as_posted
from blockflow.control.manager import Manager
from blockflow.control.own import OwnFigures
from blockflow.control.profiles import ProfileShelf
from blockflow.control.samples import Former, store_samples
from blockflow.control.stewardship import Biography
from blockflow.control.stock import Stock
from blockflow.control.stored import PastEpoch
from blockflow.control.update import Kind, Update
from blockflow.control.views import Views
from blockflow.core.cores import at_once
from blockflow.core.errors import Problem, RepositoryError, RequestError, SystemError_
from blockflow.core.model import BlockInfo
from blockflow.core.specs import BlockSpec
from blockflow.launch.ward import Ward
from blockflow.repository.repository import BlockRepository

WAIT_S = 300.0
"""How long a waiting call waits for its update; the update itself goes on."""

MAX_HZ = 50.0

T = TypeVar("T")


class Commands:
    """Everything that can be asked, over one Manager and one block repository.

    Args:
        manager: started.
        repository: where blocks are looked up.
        ward: of a guardian, None without.

    Attributes:
        addresses: where REST and clients are reached, shown by status.
        biography: of this Manager and those before it.
        template_pid: gives the pid of the process that workers are forked from, 0 = none.
    """

    def __init__(
        self, manager: Manager, repository: BlockRepository, ward: Ward | None = None
    ) -> None:
        self._manager = manager
        profiles = ProfileShelf(repository.root)
        self._stock = Stock(repository, profiles)
        self._acceptance = Acceptance(manager, repository, profiles)
        self._own = OwnFigures()
        self.biography = Biography(ward)
        self.addresses: dict[str, Any] = {}
        self.template_pid: Callable[[], int] = lambda: 0

    # --- updates --------------------------------------------------------------------------------

    def preview(
        self, body: Any, problems: Sequence[Problem] = (), *, if_epoch: int | None = None
    ) -> dict[str, Any]:
        """What an update would change: ``{changed, epoch, plan}``. Raises as :meth:`apply`."""
        self._stock.check()
        topology = self._acceptance.parse(as_posted(body), problems)
        return self._manager.call(lambda: self._manager.brain.preview(topology, if_epoch))

    def apply(
        self,
        body: Any,
        *,
        wait_s: float = WAIT_S,
        problems: Sequence[Problem] = (),
        if_epoch: int | None = None,
    ) -> dict[str, Any]:
        """Apply a system update.

        Args:
            body: decoded JSON, either form.
            wait_s: how long to wait for its end; 0 returns as soon as it is accepted.
            problems: what the decoding found already; reported with what is found here.
            if_epoch: the epoch that must be in force when it begins; None: any.

        Returns:
            ``{"epoch": in force, "update": {...}}``; the update's ``state`` tells how far it is.

        Raises:
            TopologyError: INVALID_TOPOLOGY, UPDATE_IN_PROGRESS, UPDATE_FAILED, EPOCH_MISMATCH.
            SystemError_: NO_SPACE when the new epoch cannot be stored.
        """
        body = as_posted(body)
        self._stock.check()
        topology = self._acceptance.parse(body, problems)
        manager = self._manager
        update = manager.call(
            lambda: manager.brain.apply(topology, body, time.monotonic_ns(), Kind.SYSTEM, if_epoch)
        )
        return self._outcome(update, wait_s)

    def history(self) -> list[dict[str, Any]]:
        """The epochs that are remembered, newest first; ``missing`` names the blocks whose artifact
        of then is not stored any more, and is None while the repository is away."""
        manager = self._manager
        state, serves = manager.call(lambda: (manager.store.state, manager.brain.realm.topology))
        pinned = {pair for p in state.history for pair in p.digests.items()}
        gone = self._stock.gone(pinned)
        return [
            {
                "epoch": p.epoch,
                "how": p.how,
                "when": p.when,
                "in_force": p.epoch == state.epoch and serves is not None,
                "posted": as_posted(p.posted),
                "digests": dict(p.digests),
                "missing": None
                if gone is None
                else [b for b, d in p.digests.items() if (b, d) in gone],
            }
            for p in reversed(state.history)
        ]

    def rollback(
        self,
        to: int | None = None,
        *,
        wait_s: float = WAIT_S,
        dry_run: bool = False,
        if_epoch: int | None = None,
    ) -> dict[str, Any]:
        """Put the topology of an earlier epoch in force again, as a new epoch, with the artifacts
        that it had then.

        Args:
            to: the epoch; None = the one before that in force.
            wait_s: as of :meth:`apply`.
            dry_run: only tell what would change, as :meth:`preview`.
            if_epoch: as of :meth:`apply`.

        Raises:
            SystemError_: NOT_FOUND when that epoch is not remembered.
            TopologyError: as :meth:`apply`; ARTIFACT_MISSING is among the problems of
                INVALID_TOPOLOGY when a block has been replaced.
        """
        manager = self._manager
        past = self._past(to)
        self._stock.check()
        topology = self._acceptance.parse(past.posted, digests=past.digests)
        if dry_run:
            return manager.call(lambda: manager.brain.preview(topology, if_epoch))
        update = manager.call(
            lambda: manager.brain.apply(
                topology, past.posted, time.monotonic_ns(), Kind.ROLLBACK, if_epoch
            )
        )
        return self._outcome(update, wait_s)

    def _past(self, to: int | None) -> PastEpoch:
        state = self._manager.call(lambda: self._manager.store.state)
        known = [p.epoch for p in state.history]
        for past in reversed(state.history):
            if past.epoch == to or (to is None and past.epoch < state.epoch):
                return past
        raise SystemError_(
            "NOT_FOUND",
            "no earlier epoch is remembered"
            if to is None
            else f"epoch {str(to)[:20]} is not remembered",
            hint=f"GET /v1/history; epochs: {', '.join(map(str, known)) or 'none'}",
        )

    def _lost(self) -> list[str]:
        """Blocks whose workers could not be replaced; looked up outside the Manager's thread."""
        topology = self._manager.call(lambda: self._manager.brain.realm.topology)
        return [] if topology is None else self._stock.lost(topology)

    def operate(self, kind: Kind, block: str, *, wait_s: float = WAIT_S) -> dict[str, Any]:
        """Restart, drain, undrain or stop one block; the result is that of :meth:`apply`."""
        brain = self._manager.brain

        def begin() -> Update:
            now = time.monotonic_ns()
            if kind is Kind.RESTART:
                return brain.restart(block, now)
            return brain.close(block, kind, now)

        return self._outcome(self._manager.call(begin), wait_s)

    def _outcome(self, update: Update, wait_s: float) -> dict[str, Any]:
        manager = self._manager
        if wait_s > 0:
            manager.wait_update(update.update_id, wait_s)
        elif update.final:
            wait_s = 1.0  # it was over at once: its error belongs in this answer

        def tell() -> dict[str, Any]:
            if update.error is not None and wait_s > 0:
                raise update.error
            now = time.monotonic_ns()
            return {"epoch": manager.brain.realm.epoch, "update": update.to_dict(now)}

        return manager.call(tell)

    def updates(self) -> list[dict[str, Any]]:
        return self._look(Views.updates)

    def update(self, update_id: int) -> dict[str, Any]:
        """One update. Raises SystemError_: NOT_FOUND."""
        found = [u for u in self.updates() if u["id"] == update_id]
        if not found:
            earlier = 0 < update_id < self._manager.number
            why = " any more: the control plane has been restarted since" if earlier else ""
            raise SystemError_("NOT_FOUND", f"no update {update_id}{why}", hint="GET /v1/updates")
        return found[0]

    # --- looking --------------------------------------------------------------------------------

    def _look(self, look: Callable[[Views], T]) -> T:
        """What ``look`` finds at one moment, in the Manager's thread."""
        return self._manager.call(lambda: look(self._manager.views()))

    def topology(self) -> dict[str, Any]:
        """What is in force; where the stored topology could not be deployed, what was posted for
        that."""
        manager = self._manager
        found, stored = manager.call(lambda: (manager.views().topology(), manager.store.state))
        posted = found["posted"] if found["topology"] else stored.posted
        return {**found, "posted": as_posted(posted)}

    def epoch(self) -> dict[str, Any]:
        return self._look(Views.epoch)

    def tasks(self) -> list[dict[str, Any]]:
        return self._look(Views.tasks)

    def blocks(self) -> list[dict[str, Any]]:
        return self._look(Views.blocks)

    def block(self, name: str) -> dict[str, Any]:
        """One block, with its profile's state. Raises RepositoryError: UNKNOWN_BLOCK."""

        def look() -> tuple[dict[str, Any], BlockSpec, BlockInfo]:
            view, topology = self._manager.views().block(name), self._manager.brain.realm.topology
            if topology is None:
                raise RepositoryError("UNKNOWN_BLOCK", f"no block {name!r}", where=name)
            return view, topology.blocks[name], topology.infos[name]

        view, spec, info = self._manager.call(look)
        return {**view, "profile": self._stock.profile(spec, info)}

    def workers(self) -> list[dict[str, Any]]:
        """All workers, then the Dispatcher."""
        return self._look(lambda views: [*views.workers(), views.dispatcher()])

    def worker(self, name: str) -> dict[str, Any]:
        """One worker or ``dispatcher``. Raises SystemError_: NOT_FOUND."""
        found = self._look(lambda views: views.worker(name))
        if found is None:
            raise SystemError_("NOT_FOUND", f"no worker {name!r}", hint="GET /v1/workers")
        return found

    def health(self) -> dict[str, Any]:
        return self._look(Views.health)

    def kpis(self) -> dict[str, Any]:
        """The latest figures of everything."""

        def look(views: Views) -> dict[str, Any]:
            return {
                "epoch": self._manager.brain.realm.epoch,
                "monitor_hz": self._manager.brain.crew.hz,
                "blocks": [{"name": b["name"], "kpi": b["kpi"]} for b in views.blocks()],
                "tasks": [{"name": t["name"], "kpi": t["kpi"]} for t in views.tasks()],
                "workers": [_worker_kpi(w) for w in views.workers()],
                "dispatcher": _worker_kpi(views.dispatcher()),
                "totals": views.totals(),
            }

        return {**self._look(look), "control": self._own.figures(self.template_pid())}

    def status(self) -> dict[str, Any]:
        """Everything that ``blockflow status`` and ``blockflow top`` show, of one moment."""
        manager = self._manager
        lost, replaced = self._lost(), release.warning()

        def look(views: Views) -> dict[str, Any]:
            current = manager.brain.runner.under_way
            updates = views.updates()
            return {
                "state": views.state(),
                **views.health(),
                **views.epoch(),
                "tasks": views.tasks(),
                "blocks": views.blocks(),
                "workers": views.workers(),
                "dispatcher": views.dispatcher(),
                "totals": views.totals(),
                "monitor_hz": manager.brain.crew.hz,
                "updating": current.to_dict(time.monotonic_ns()) if current is not None else None,
                "last_update": updates[0] if updates else None,
                "warnings": views.warnings(replaced, *manager.warnings(), *lost),
                "controller": {
                    **asdict(manager.controller.counters),
                    "strays": manager.brain.crew.strays,
                    "late_acks": manager.brain.realm.publication.late,
                },
            }

        settings = manager.settings
        return {
            "release": __version__,
            "pid": self.biography.pid,
            "manager": self.biography.to_dict(manager.outcome),
            "uptime_s": self.biography.uptime_s(),
            **self.addresses,
            "run_dir": str(manager.run_dir.path),
            "state_dir": str(settings.state_dir),
            "repository": str(settings.repository),
            "cores": list(settings.cores),
            "cores_at_once": at_once(settings.cores),
            **self._look(look),
            "control": self._own.figures(self.template_pid()),
        }

    def repository(self) -> list[dict[str, Any]]:
        """The stored blocks; those whose manifest cannot be read come with their error."""
        return self._stock.blocks()

    # --- doing ----------------------------------------------------------------------------------

    def ping(self, block: str | None = None) -> list[dict[str, Any]]:
        """Ping one block's workers, or every process. Raises RepositoryError: UNKNOWN_BLOCK."""
        names: set[str] | None = None
        if block is not None:
            realm = self._manager.brain.realm
            names = self._manager.call(lambda: {r.name for r in realm.hosts(block)})
        answers = self._manager.ping(names)
        if names is not None:  # a worker that is down has no process to ask
            found = {a["worker"] for a in answers}
            answers += [{"worker": n, "incarnation": None, "ok": False} for n in names - found]
        return answers

    def monitor(self, hz: int | float) -> dict[str, Any]:
        """Sample KPIs ``hz`` times a second everywhere; 0 = off."""
        if not 0 <= hz <= MAX_HZ:
            raise RequestError(
                "INVALID_REQUEST", f"hz {str(hz)[:20]} is outside 0..{MAX_HZ:g}", where="hz"
            )
        rate = float(hz)
        self._manager.call(lambda: self._manager.brain.monitor(rate))
        return {"on": rate > 0, "hz": rate}

    def store_kpis(self, name: str, former: Former = Former.KEPT) -> dict[str, Any]:
        """Write the recent samples below the state directory, one JSON object per line; ``former``
        says what becomes of a file of that name.

        Raises as :func:`store_samples`, and INVALID_REQUEST where there are none: a former file of
        that name is not given up for nothing.
        """
        lines = self._manager.call(self._manager.kpis.lines)
        if not lines:
            raise RequestError(
                "INVALID_REQUEST",
                "there are no figures to store: none have been taken yet",
                hint="POST /v1/monitor (blockflow monitor on) has them taken",
            )
        path = store_samples(self._manager.settings.state_dir / "kpis", name, lines, former)
        return {"path": str(path), "count": len(lines)}


def _worker_kpi(view: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("name", "incarnation", "state", "kpi_age_s", "process", "stages", "kpi")
    return {k: view[k] for k in keys if k in view}
