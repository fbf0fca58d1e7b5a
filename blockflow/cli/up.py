"""``blockflow up``: start the system and run it in the foreground."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockflow.cli.exits import ExitCode
from blockflow.cli.streams import complain, say
from blockflow.core.errors import BlockFlowError, RequestError, SystemError_
from blockflow.core.scarcity import AWAY, failure, no_room

if TYPE_CHECKING:
    from blockflow.launch.ward import Ward


_LOG_S = 0.5
"""So long the Manager waits for a line of its own to be written, if its disk does not answer."""


def up(
    topology: Annotated[
        str, typer.Option("--topology", help="Apply this topology once the system is up.")
    ] = "",
    repository: Annotated[
        str, typer.Option("--repository", "-r", help="Folder with the blocks.")
    ] = "blocks",
    state_dir: Annotated[
        str,
        typer.Option(
            "--state-dir",
            help="Folder of the durable state.",
            show_default="~/.local/state/blockflow",
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="Where REST listens; beyond loopback with --keys and --rest-cert or --rest-plain.",
        ),
    ] = "127.0.0.1",
    client_host: Annotated[
        str,
        typer.Option(
            "--client-host", help="Where clients are served; beyond loopback with --keys only."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="REST; 0 takes a free one.")
    ] = 5780,
    client_port: Annotated[
        int, typer.Option("--client-port", min=0, max=65535, help="Clients; 0 takes a free one.")
    ] = 5755,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            envvar="BLOCKFLOW_KEYS",
            help="Folder of `blockflow keys init`: tcp is encrypted and for authorised clients "
            "only, REST asks for the token in it.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="REST asks for this token instead, also without --keys."),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", help="A further name of this machine that REST answers to."),
    ] = None,
    rest_cert: Annotated[
        Path | None,
        typer.Option("--rest-cert", help="REST is HTTPS with this certificate (PEM)."),
    ] = None,
    rest_key: Annotated[
        Path | None,
        typer.Option("--rest-key", help="Its key (PEM), a private file without a password."),
    ] = None,
    rest_plain: Annotated[
        bool,
        typer.Option(
            "--rest-plain",
            help="REST may be plain HTTP beyond loopback: something else encrypts the way here.",
        ),
    ] = False,
    max_inflight: Annotated[
        int,
        typer.Option("--max-inflight", min=1, max=512, help="Requests in flight at most."),
    ] = 256,
    adaptive_limit: Annotated[
        bool,
        typer.Option(
            "--adaptive-limit/--fixed-limit",
            help="Admit fewer where requests queue, and none that cannot meet its deadline.",
        ),
    ] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget the stored topology (a copy is kept).")
    ] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Announce readiness as a JSON line.")
    ] = False,
) -> None:
    """Start manager, controller, REST and the dispatcher; run until Ctrl-C, SIGTERM,
    SIGHUP or `blockflow stop`.

    The topology that was last in force is deployed again.
    """
    from blockflow.control.guardian import Guardian
    from blockflow.control.settings import ControlSettings, default_state_dir
    from blockflow.launch.logs import tell_the_time, wait_for_no_disk
    from blockflow.launch.outlet import wait_for_nobody
    from blockflow.launch.process import ending_signals, own_what_is_made, raise_descriptor_limit
    from blockflow.launch.whereabouts import settle

    everywhere = {"0.0.0.0", "::"} & {host, client_host}
    if port and port == client_port and (host == client_host or everywhere):
        raise RequestError(
            "INVALID_REQUEST",
            f"port {port} is asked for REST and for clients",
            where="--port, --client-port",
            hint="take two; 0 is a free one",
        )
    raise_descriptor_limit()
    own_what_is_made()
    wait_for_nobody()
    tell_the_time()
    if not os.environ.get("BLOCKFLOW_DEBUG"):
        logging.getLogger("blockflow").setLevel(logging.INFO)
    settings = ControlSettings(
        repository=Path(repository),
        state_dir=Path(state_dir) if state_dir else default_state_dir(),
        host=host,
        client_host=client_host,
        rest_port=port,
        client_port=client_port,
        keys=keys,
        token_file=token_file,
        names=tuple(name or ()),
        rest_cert=rest_cert,
        rest_key=rest_key,
        rest_plain=rest_plain,
        max_inflight=max_inflight,
        max_inflight_per_client=max_inflight,
        adaptive_limit=adaptive_limit,
    ).lasting()
    settle()
    ward = Guardian(settings.run_root).run()
    if isinstance(ward, int):  # this is the guardian, and everything has ended
        raise typer.Exit(ward)
    # From here on this is the Manager's process: the guardian stays without all these libraries.
    wait_for_no_disk(_LOG_S)
    with _ending_at_once(ward):
        _import_all()
    from blockflow.control.rest.body import read_update
    from blockflow.control.system import System

    first = ward.deaths == 0
    if first:
        look_at(settings.repository)
    body = read_update(topology) if topology and first else None
    system = System(settings, fresh=fresh and first, ward=ward)
    for number in ending_signals():
        signal.signal(number, lambda *_: system.ask_stop())
    if ward.stop_asked():
        system.ask_stop()
    with _ending_at_once(ward), system:
        if body is not None and not system.wait(0):
            try:
                system.deploy(body)
            except BlockFlowError as e:
                # The system is up and can be mended by another update; say what was wrong.
                complain(f"{topology}: {e}")
        system.serving()
        if first and not system.wait(0):
            _announce(system.announcement(), json_)
        system.wait()
        if not json_:
            _say("stopping")


def look_at(repository: Path) -> None:
    """Complain if nothing can be served from there yet, or what anybody puts there."""
    from blockflow.control.disk import GLANCE_S, Disk

    disk = Disk(repository)
    try:
        if disk.is_there(GLANCE_S):
            with suppress(OSError):  # it is gone again
                if disk.ask(repository.stat, GLANCE_S).st_mode & stat.S_IWOTH:
                    text = f"anybody can write to {str(repository)!r}, and blocks are code that is "
                    complain(f"{text}run: chmod o-w it; `blockflow doctor` looks at what is in it")
            return
        text = f"there is no folder {str(repository)!r} yet: export blocks into it, or give "
        complain(f"{text}another one by --repository")
    except BlockFlowError as e:
        complain(e)


def _import_all() -> None:
    """Import what a Manager is made of. Raises SystemError_: the installation is broken, or of
    another release by now than this process's modules."""
    from blockflow.control.release import warning
    from blockflow.launch.preload import few_collections

    try:
        with few_collections():
            import_module("blockflow.control.system")
    except Exception as e:
        told = f"the control plane cannot be imported: {type(e).__name__}: {e}"
        hint = "mend the installation"
        raise no_room(e, told, "up") or SystemError_(
            "INTERNAL", told, hint=hint, details={AWAY: True}
        ) from e
    if told := warning():  # afterwards: the files may have been replaced meanwhile
        raise SystemError_("INTERNAL", told)


@contextmanager
def _ending_at_once(ward: Ward) -> Iterator[None]:
    """A Manager that cannot take over has left alone what runs, and what it has begun itself would
    keep its process for a while: the next one waits for nothing but its end."""
    from blockflow.launch.ward import awaited

    try:
        yield
    except Exception as e:
        error = e if isinstance(e, BlockFlowError) else failure(e, repr(e), "up")
        if awaited(error):
            ward.line.failing(error)
        if not ward.adopt:
            raise
        if not awaited(error):
            complain(error)
        os._exit(ExitCode.FAILED)


def _announce(facts: dict[str, Any], json_: bool) -> None:
    if json_:
        say(json.dumps(facts), _lost)
        return
    _say(f"REST     {facts['rest']}")
    for address in facts["clients"]:
        _say(f"clients  {address}")
    _say(f"state    {facts['state_dir']} (epoch {facts['epoch']})")
    well = facts["state"] != "degraded"
    _say(f"{'ready' if well else 'degraded (blockflow status says why)'}; Ctrl-C stops it")


def _say(line: str) -> None:
    say(line, _lost)


def _lost(error: OSError) -> None:
    """Who reads the announcement may go when he has read it; the system is not for him alone."""
    complain(f"the output cannot be written ({error.strerror}); the system serves on")
