"""What a Dispatcher has of its own beside its sockets: an arena, files, the keys of its clients."""

from __future__ import annotations

from pathlib import Path

from blockflow.core.launchspec import DispatcherLaunch
from blockflow.launch.cgroup import memory_rooms
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.channel import Producer
from blockflow.tensormq.curve import CLIENTS, Gatekeeper, Protect
from blockflow.tensormq.inline import InlineProducer
from blockflow.tensormq.janitor import remove_leavings
from blockflow.tensormq.keys import Keyring
from blockflow.tensormq.shm import ShmProducer
from blockflow.tensormq.sockets import remove_socket_files


def remove_files(launch: DispatcherLaunch) -> None:
    """Remove the arena and the socket files (ZeroMQ leaves those); also of a dead Dispatcher."""
    remove_leavings(Path(launch.run_dir), launch.incarnation)
    remove_socket_files(launch.client_endpoints)


def client_protection(launch: DispatcherLaunch, keeper: Gatekeeper) -> Protect | None:
    """What sets CURVE up at the clients' socket; None: they need no keys."""
    if not launch.keys:
        return None
    ring = Keyring(Path(launch.keys))
    return keeper.protect(CLIENTS, ring.server(), ring.allows)


def input_producer(launch: DispatcherLaunch, run_dir: Path) -> Producer:
    """Where inputs are kept: an arena, or, where nothing travels by handle, their frames."""
    if launch.arena_bytes == 0:
        return InlineProducer()
    arena = Arena.create(run_dir, launch.incarnation, launch.arena_bytes, launch.slots)
    return ShmProducer(arena, memory_rooms)
