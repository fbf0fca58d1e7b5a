"""Hard limits, checked before anything is allocated.

They bound what a peer can make a process do; the topology's own limits are smaller and chosen by
the operator.
"""

from __future__ import annotations

PROTOCOL_VERSION = 1
"""Version of all three message families (client, data, control); see wire/PROTOCOL.md."""

MAX_HEADER_BYTES = 4096
"""A data-plane header: routing, items and tensor descriptors."""

MAX_CONTROL_BYTES = 1024 * 1024
"""A control message (routes of a large topology, statistics)."""

MAX_REST_BODY_BYTES = 1024 * 1024
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""All tensors of one message together."""

MAX_RANK = 8
MAX_NESTING = 4
MAX_DIM = 2**31 - 1
MAX_TASKS_PER_REQUEST = 16
MAX_PATH_NODES = 64
MAX_ITEMS_PER_MESSAGE = 64
MAX_NAME_CHARS = 64
MAX_BLOCKS = 1024
MAX_TASKS = 4096
MAX_REPLICAS = 256

DEFAULT_DEADLINE_MS = 10_000
MAX_DEADLINE_MS = 60_000

DEFAULT_MAX_ROWS = 32
"""Rows that one request may bring unless the topology says otherwise; sizes the arenas."""

MAX_ROWS = 65_536

NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"
"""Names of blocks, tasks and workers: safe as file names, in URLs and on a terminal."""
