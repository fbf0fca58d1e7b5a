"""System: a whole BlockFlow instance run by this process, as one object.

``blockflow up`` is a thin command over it; tests, the demo and benchmarks use it in process.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from blockflow.control.asked import Asked
from blockflow.control.commands import WAIT_S, Commands
from blockflow.control.disk import GLANCE_S, Disk
from blockflow.control.exposure import check_exposure, check_state_dir, check_tls
from blockflow.control.kept_secrets import KeptSecrets
from blockflow.control.manager import Manager
from blockflow.control.rest.server import RestServer
from blockflow.control.restoration import Restoration
from blockflow.control.settings import ControlSettings, with_port
from blockflow.control.stewardship import inherit
from blockflow.control.store import StateStore
from blockflow.control.update import Update
from blockflow.core.errors import BlockFlowError, RequestError, SystemError_
from blockflow.core.lifecycle import State
from blockflow.launch.base import Launcher
from blockflow.launch.local import TemplateLauncher
from blockflow.launch.preload import REHEARSAL
from blockflow.launch.process import become_subreaper
from blockflow.launch.refused import not_started, thread_refused
from blockflow.launch.ward import CLIENTS, REST, Ward
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.curve import make_link_key
from blockflow.tensormq.janitor import RunDir, sweep_stale
from blockflow.tensormq.listening import no_port
from blockflow.tensormq.ports import hold, is_v6

log = logging.getLogger("blockflow.control")

T = TypeVar("T")

_START_S = 180.0
_HEED_SIGNALS_S = 1.0
RESTORE_S = 300.0


class System:
    """Manager, Controller, REST and (through them) Dispatcher and workers.

    Args:
        settings: of the control plane; the other arguments override single ones.
        repository: folder of the block repository.
        state_dir: folder of the durable state; one System at a time may use it.
        rest_port, client_port: 0 takes free ones, see ``rest_url`` and ``client_endpoint``.
        fresh: forget the stored topology (it is kept under another name).
        launcher: starts the processes, and stays the caller's to close; by default an own template.
        ward: of a guardian, in whose hands everything stays that another process shall go on with
            when this one dies.

    Use it as a context manager, or call :meth:`start` and :meth:`stop`.
    """

    def __init__(
        self,
        settings: ControlSettings | None = None,
        *,
        repository: Path | str | None = None,
        state_dir: Path | str | None = None,
        rest_port: int | None = None,
        client_port: int | None = None,
        fresh: bool = False,
        launcher: Launcher | None = None,
        ward: Ward | None = None,
    ) -> None:
        chosen = settings or ControlSettings()
        if repository is not None:
            chosen = replace(chosen, repository=Path(repository))
        if state_dir is not None:
            chosen = replace(chosen, state_dir=Path(state_dir))
        if rest_port is not None:
            chosen = replace(chosen, rest_port=rest_port)
        if client_port is not None:
            chosen = replace(chosen, client_port=client_port)
        if ward is not None and ward.client_port:
            chosen = replace(chosen, client_port=ward.client_port)
        self.settings = chosen.lasting()
        self._fresh = fresh
        self._launcher = launcher
        self._ward = ward
        self._stop_asked = Asked()
        self._undo: list[Any] = []

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start everything; returns when the Dispatcher takes clients and the stored topology, if
        there is one, was deployed again (or at once when a stop is asked for meanwhile).

        Raises:
            BlockFlowError: ALREADY_RUNNING, PORT_IN_USE, STATE_CORRUPT, NO_SPACE, ...; what had
                been started is stopped again. Not so by a Manager with a predecessor: what runs
                serves on, and is for the next one to take over when this one's process has ended.
        """
        try:
            self._start()
        except BaseException as e:
            ward = self._ward
            if ward is None or not ward.adopt or self._stop_asked.is_set():
                self.stop()
            if isinstance(e, RuntimeError) and (number := thread_refused(e)):
                raise not_started("the control plane", str(e), number, "up") from e
            raise
        return self

    def _start(self) -> None:
        settings, ward = self.settings, self._ward
        kept_secrets = KeptSecrets(ward)
        auth, tls = check_exposure(settings, kept_secrets), check_tls(settings, kept_secrets)
        first = ward is None or not ward.deaths
        if first:  # later, what is served matters more
            check_state_dir(settings.state_dir)
        make = StateStore.open_fresh if self._fresh else partial(StateStore, succeeds=not first)
        store = make(settings.state_dir)
        self._undo.append(store.close)
        if ward is None:
            become_subreaper()
            sweep_stale(settings.run_root)
            run_dir = RunDir.create(settings.run_root)
            self._undo.append(run_dir.remove)
        else:
            run_dir = RunDir.of_another(ward.run_dir)
            store.attend(run_dir.path)
            if ward.deaths and not ward.adopt:
                store.warn(f"nothing could be taken over from the last control plane: {ward.cause}")
        self.run_dir = run_dir.path
        inheritance = inherit(settings, store, ward) if ward is not None and ward.adopt else None
        if not settings.plain_links and inheritance is None:
            make_link_key(run_dir.path)
        if inheritance is None and (ward is None or CLIENTS not in ward.kept):
            settings = self._hold_clients_port(settings)
        launcher = self._launcher
        if launcher is None:
            removes = [str(path) for path in run_dir.goes_with()]
            blocks, disk = BlockRepository(settings.repository), Disk(settings.repository)
            rehearsals = partial(rehearsals_of, blocks, disk)
            launcher = TemplateLauncher(removes=removes, rehearsals=rehearsals, ward=ward)
            self._undo.append(launcher.close)
        self.manager = Manager(
            settings, store, launcher, run_dir, ward=ward, inheritance=inheritance
        )
        self._undo.append(self.manager.stop)
        self.commands = Commands(self.manager, BlockRepository(settings.repository), ward)
        self.commands.template_pid = lambda: launcher.template_pid
        kept = ward.own(REST) if ward is not None else None
        self.rest = RestServer(
            self.commands,
            str(settings.repository),
            self.ask_stop,
            host=settings.host,
            port=settings.rest_port,
            auth=auth,
            names=settings.names,
            tls=tls,
            listener=None if kept is None else socket.socket(fileno=kept.fd),
        )
        self._undo.append(self.rest.stop)
        # Done before that: REST ends when its requests do, and one may wait for an update.
        self._undo.append(self.manager.shutdown)
        if ward is not None and kept is None:
            ward.line.keep(REST, self.rest.fileno())
        try:
            launcher.start()
        except SystemError_ as e:
            if inheritance is None:
                raise
            log.error("%s; who is served is served without", e)  # it is tried again
        self.manager.start()
        restore: Update | None = None
        if inheritance is not None:
            self._patiently(lambda: self.manager.outcome, RESTORE_S)
        if inheritance is None or inheritance.topology is None:
            restore = self._restore(store)
        if inheritance is None:
            self._wait_dispatcher()
        clients = list(self.manager.brain.crew.client_endpoints)
        self.commands.addresses = {"rest": self.rest.url, "clients": clients}
        self.rest.start()
        self.commands.biography.serving()
        if restore is not None:
            self._patiently(lambda: restore.final or None, RESTORE_S)

    def stop(self) -> None:
        """Stop everything and leave nothing behind. Idempotent."""
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception:
                log.exception("clean-up failed")

    def ask_stop(self) -> None:
        """Make :meth:`wait` return; from any thread or signal handler."""
        if self._ward is not None:
            self._ward.line.stopping()
        self._stop_asked.set()

    def serving(self) -> None:
        """From now on a guardian starts another Manager should this one die."""
        if self._ward is not None:
            tcp = next(e for e in self.commands.addresses["clients"] if e.startswith("tcp://"))
            self._ward.line.serving(int(tcp.rpartition(":")[2]))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a stop is asked for (POST /v1/shutdown, :meth:`ask_stop`).

        A signal that comes just before the wait begins has its handler run when the wait ends:
        without a timeout it ends now and then, and begins again.
        """
        if timeout_s is not None:
            return self._stop_asked.wait(timeout_s)
        while not self._stop_asked.wait(_HEED_SIGNALS_S):
            pass
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- use ------------------------------------------------------------------------------------

    @property
    def client_endpoints(self) -> list[str]:
        """Where clients reach the Dispatcher: tcp, then ipc."""
        life = self.manager.brain.crew.dispatcher
        return list(life.endpoints) if life is not None else []

    @property
    def client_endpoint(self) -> str:
        """The tcp address for clients."""
        return next(e for e in self.client_endpoints if e.startswith("tcp://"))

    @property
    def rest_url(self) -> str:
        return self.rest.url

    def apply(self, topology: Any) -> dict[str, Any]:
        """Apply a system update and wait for its end; see :meth:`Commands.apply`."""
        return self.commands.apply(topology)

    def deploy(self, topology: Any) -> None:
        """:meth:`apply`, but do not wait any longer once a stop is asked for."""
        update_id = self.commands.apply(topology, wait_s=0.0)["update"]["id"]
        update = self._patiently(lambda: self.manager.ended(update_id), WAIT_S)
        if update is not None and update.error is not None:
            raise update.error

    def status(self) -> dict[str, Any]:
        return self.commands.status()

    def announcement(self) -> dict[str, Any]:
        """What ``blockflow up --json`` prints when it is ready."""
        return {
            "event": "ready",
            "state": self.manager.call(lambda: self.manager.views().state()),
            "rest": self.rest_url,
            "clients": self.client_endpoints,
            "run_dir": str(self.run_dir),
            "state_dir": str(self.settings.state_dir),
            "pid": os.getpid() if self._ward is None else self._ward.guardian,
            "epoch": self.manager.brain.realm.epoch,
        }

    # --- start-up -------------------------------------------------------------------------------

    def _hold_clients_port(self, settings: ControlSettings) -> ControlSettings:
        """Let nobody else have it while the Dispatcher is replaced; the settings with its number.

        Raises as :func:`hold_address`.
        """
        held = hold_address(settings.client_host, settings.client_port)
        if held is None:
            return settings
        self._undo.append(held.close)
        if self._ward is not None:
            self._ward.line.keep(CLIENTS, held.fileno())
        return replace(settings, client_port=held.getsockname()[1])

    def _restore(self, store: StateStore) -> Update | None:
        """Deploy the stored topology again."""
        if store.state.topology is None:
            return None
        restoration = Restoration(self.manager, store.state)
        self._undo.append(restoration.close)
        return restoration.begin()

    def _wait_dispatcher(self) -> None:
        crew = self.manager.brain.crew

        def settled() -> BlockFlowError | bool | None:
            if crew.dispatcher_crash is not None:
                crash = crew.dispatcher_crash
                text = f"the dispatcher did not start: {crash.cause}"
                return crash.error or SystemError_("INTERNAL", text, hint="\n".join(crash.log_tail))
            life = crew.dispatcher
            return True if life is not None and life.state is State.READY else None

        outcome = self._patiently(settled, _START_S)
        if outcome is None and not self._stop_asked.is_set():
            raise SystemError_("START_TIMEOUT", "the dispatcher was not ready in time")
        if isinstance(outcome, BlockFlowError):
            raise outcome

    def _patiently(self, test: Callable[[], T | None], timeout_s: float) -> T | None:
        """Wait for ``test`` in the Manager's thread, but not once a stop is asked for."""
        end = time.monotonic() + timeout_s
        while not self._stop_asked.is_set() and time.monotonic() < end:
            found = self.manager.wait(test, 0.2)
            if found is not None:
                return found
        return None


def rehearsals_of(repository: BlockRepository, disk: Disk) -> list[tuple[str, dict[str, str]]]:
    """What a template rehearses: a worker's start, unless the ``disk`` with its blocks does not
    answer. A template that waits for it would start nobody, not even the Dispatcher."""
    try:
        disk.ask(repository.names, GLANCE_S)
    except BlockFlowError as e:
        log.warning("workers will have more memory of their own: %s", e.message)
        return []
    return [(REHEARSAL, {"repository": str(repository.root)})]


def hold_address(host: str, port: int) -> socket.socket | None:
    """Find out that clients cannot be served there before any process is started for it, and hold
    the port (:mod:`blockflow.tensormq.ports`); None where that cannot be done for another reason,
    which the Dispatcher will tell.

    Raises:
        SystemError_: PORT_IN_USE; NO_SPACE: any port was asked for, and none is free.
        RequestError: INVALID_REQUEST: not an address of this machine, or a name without any.
    """
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise RequestError(
            "INVALID_REQUEST",
            f"{host[:100]!r} has no address: {e}",
            where="--client-host",
            hint="take an address of this machine, or a name that it can look up",
        ) from e
    v6 = is_v6(f"tcp://{with_port(host, port)}")
    family = socket.AF_INET6 if v6 else socket.AF_INET
    try:
        return hold(host, port, family)
    except OSError as e:
        if e.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise RequestError(
                "INVALID_REQUEST",
                f"{host!r} is no address of this machine",
                where="--client-host",
                hint="take one that `ip address` shows",
            ) from e
        if e.errno != errno.EADDRINUSE:
            return None
        place = with_port(host, port)
        if not port:
            raise no_port(f"tcp://{place}") from e
        raise SystemError_(
            "PORT_IN_USE",
            f"another process listens on {place}",
            where=f"tcp://{place}",
            hint="stop it, or choose another --client-port (0 takes a free one)",
        ) from e
