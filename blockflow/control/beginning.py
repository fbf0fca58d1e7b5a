"""Beginning: whether an update may begin now, and what becomes of one at a shutdown. Pure."""

from __future__ import annotations

from blockflow.control.update import Kind, Phase, Update
from blockflow.core.errors import SystemError_, TopologyError

RETRY_MS = 250
"""Most updates are done within that time."""

ENDED_EARLY = "the system shut down before the requests on the old routes had ended"


def check_epoch(asked: int | None, epoch: int) -> None:
    """Whoever made an update of what he had read says of which epoch that was: if another one is
    in force by now, his update would undo what he does not know.

    Args:
        asked: the epoch that must be in force; None: any.
        epoch: the one that is.

    Raises:
        TopologyError: EPOCH_MISMATCH.
    """
    if asked is None or asked == epoch:
        return
    raise TopologyError(
        "EPOCH_MISMATCH",
        f"epoch {epoch} is in force, not {str(asked)[:20]}",
        where="if_epoch",
        hint="nothing was changed; read GET /v1/topology again, and make the update of that",
        details={"epoch": epoch},
    )


def check_free(stopping: bool, busy: Update | None) -> None:
    """One update at a time, and none in a system that ends.

    Raises:
        SystemError_: NOT_RUNNING.
        TopologyError: UPDATE_IN_PROGRESS.
    """
    if stopping:
        raise SystemError_("NOT_RUNNING", "the system is shutting down")
    if busy is not None:
        raise TopologyError(
            "UPDATE_IN_PROGRESS",
            f"update {busy.update_id} ({busy.kind}) is {busy.phase}",
            hint=f"wait for it: GET /v1/updates/{busy.update_id}",
            details={"update": busy.update_id},
            retry_after_ms=RETRY_MS,
        )


def in_force(update: Update) -> bool:
    """What it asks for is in force, and stored if it is to be: it can only be done."""
    return update.phase in (Phase.PUBLISHING, Phase.DRAINING)


def may_be_set_aside(update: Update) -> bool:
    """All that is left of it is to stop whom it replaced, once the requests on the old routes have
    ended: another update may begin meanwhile. What waits to close a block is not of that sort: the
    next update may open it again."""
    replaces = update.kind in (Kind.SYSTEM, Kind.ROLLBACK, Kind.RESTART)
    return replaces and update.phase is Phase.DRAINING


def cut_short(update: Update, epoch: int) -> TopologyError:
    """Why an update failed that was being prepared when the system shut down.

    Args:
        update: it.
        epoch: the one in force, 0 = none.
    """
    then = f"epoch {epoch} comes back at the next start" if epoch else "the next start has none"
    stored = "nothing was stored, and " if update.stores else ""
    return TopologyError(
        "UPDATE_FAILED",
        f"the system shut down before it was done: {stored}{then}",
        hint="send it again when the system runs",
    )
