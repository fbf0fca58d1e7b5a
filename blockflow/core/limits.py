"""Hard limits, checked before anything is allocated.

They bound what a peer can make a process do; the topology's own limits are smaller and chosen by
the operator.
"""

from __future__ import annotations

PROTOCOL_VERSION = 2
"""Version of all three message families (client, data, control); see wire/PROTOCOL.md."""

MAX_HEADER_BYTES = 4096
"""A data-plane header: routing, items and tensor descriptors."""

MAX_CONTROL_BYTES = 1024 * 1024
"""A control message (routes of a large topology, statistics)."""

MAX_DESCRIPTION_BYTES = 4 * 1024 * 1024
"""What a client is told of all published tasks: more than routes, in which tasks of one path have
their contract in common."""

MAX_REST_BODY_BYTES = 1024 * 1024
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""All tensors of one message together."""
MAX_UNANSWERED_BYTES = 128 * 1024 * 1024
"""Of tensors that a client has sent in messages on one connection and that were not answered yet; a
larger one is sent when there is no other."""

ARENA_ALIGN = 4096
"""Tensors of so many bytes and more begin at multiples of it in an arena or slab, and take whole
multiples: a page of most machines. It stays that where pages are larger (up to 64 KiB on ARM)."""

ARENA_GAPS = 2
"""First fit may leave a gap beside each tensor that is just too small for the next one: where n
are out, room for 2 n + 1 of the largest is surely room for one more."""

MAX_RANK = 8
MAX_NESTING = 4
MAX_DIM = 2**31 - 1
MAX_TASKS_PER_REQUEST = 16
MAX_PATH_NODES = 64
MAX_ITEMS_PER_MESSAGE = 64
MAX_WITHDRAWN_PER_MESSAGE = 128
MAX_NAME_CHARS = 64
MAX_BLOCKS = 1024
MAX_TASKS = 4096
MAX_SHARES = 2 * MAX_TASKS
"""Highest index of a task's share: those of one topology and of the one before it."""

MAX_REPLICAS = 256

MAX_LANES = 16
"""Forwards that one worker computes at once."""

MAX_GRANT_SLOTS = 16
"""Slots of one segment that the Dispatcher grants a client of its host (tensormq/grants.py)."""

MAX_GRANT_CLIENTS = 64
"""Clients that have granted memory at once."""

MAX_CLIENT_GRANT_BYTES = 1024 * 1024 * 1024
"""All segments of one client. Pages cost memory when they are first written, not before."""

MAX_GRANTED_BYTES = 4 * 1024 * 1024 * 1024
"""All segments of all clients; a quarter of the machine's memory where that is less."""

DEFAULT_DEADLINE_MS = 10_000
MAX_DEADLINE_MS = 60_000

MAX_CPU_LATENCY_US = 10_000
"""No core sleeps so deeply that it takes longer to wake."""

DEFAULT_MAX_ROWS = 32
"""Rows that one request may bring unless the topology says otherwise; sizes the arenas."""

MAX_ROWS = 65_536

NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
"""Names of blocks, tasks and workers: safe as file names, in URLs and on a terminal."""

VERSION_CHARS = r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}"
"""A block's version, the label that its maker gave it."""

BLOCK_PATTERN = rf"^[A-Za-z][A-Za-z0-9_.-]{{0,63}}(@{VERSION_CHARS})?$"
"""A block of a topology: a name, which means the current version, or ``name@version``."""
