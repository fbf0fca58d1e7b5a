"""Begin: how a template's process is started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

from blockflow.core import limits
from blockflow.launch.environment import spawn
from blockflow.launch.refused import not_started


def start_template(
    config: Mapping[str, Any], lifeline_fd: int, *, log_path: str
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start one and do not wait for its imports.

    Args:
        config: what the template is told, but for the numbers of its descriptors.
        lifeline_fd: read end of the guardian's pipe.
        log_path: where its own errors go, '' = this process's stderr.

    Returns:
        Its process, and the socket to it.

    Raises:
        SystemError_: NO_SPACE, INTERNAL: it cannot be started, at present at least.
    """
    try:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                for end in (mine, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.MAX_CONTROL_BYTES)
                with open(log_path or os.devnull, "ab") as log:
                    process = spawn(
                        "blockflow.launch.template",
                        json.dumps({**config, "control": theirs.fileno(), "lifeline": lifeline_fd}),
                        fds=(theirs.fileno(), lifeline_fd),
                        log=log if log_path else None,
                    )
            except BaseException:
                mine.close()
                raise
    except OSError as exc:
        raise not_started("the template", str(exc), exc.errno or 0, "template") from exc
    return process, mine
