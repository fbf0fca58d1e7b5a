"""Lives: the schemas of what is told of processes: how far they are, and how others ended."""

from __future__ import annotations

from blockflow.control.rest.shapes import (
    TEXT,
    Schema,
    count,
    listing,
    maybe,
    number,
    obj,
    ref,
    text,
)


def crash() -> Schema:
    """Of the end of a process that should not have ended."""
    return obj(
        {
            "incarnation": count("the life that ended"),
            "age_s": maybe(
                number(
                    "how long ago, seconds; null for one under an earlier control plane where the "
                    "clock has been set back behind it since"
                )
            ),
            "cause": text("why, in a line"),
            "error": maybe(ref("ErrorObject", "the process's own error; null without one")),
            "work": listing(
                obj(
                    {
                        "block": text("of which block"),
                        "took_ms": number("for how long it had run, ms"),
                        "requests": count("for how many requests"),
                        "tickets": listing(TEXT, "the Dispatcher's names of the first of them"),
                    }
                ),
                "the forwards that it died in",
            ),
            "log": listing(TEXT, "the last lines of its log"),
        },
        description="The end of a process that should not have ended.",
    )


def life() -> dict[str, Schema]:
    """Fields of a worker or Dispatcher: its present process."""
    return {
        "incarnation": count("number of this life of it; never used again"),
        "pid": maybe(count("process id; null when there is no process")),
        "endpoint": maybe(text("where it takes messages; null until it has said so")),
        "start_ms": maybe(number("from launch to ready, ms; null until it is ready")),
        "load_ms": number("loading its artifacts, ms; 0 until it has"),
        "warm_ms": number("its first runs, ms; 0 until it has made them"),
        "probe_ms": number("its readiness probe, ms; 0 until it has passed it"),
        "uptime_s": maybe(number("since it was ready, seconds; null before and when it has ended")),
        "ping_ms": maybe(number("latest ping, until its answer was read, ms; null without one")),
        "kpi_age_s": maybe(number("since its latest sample, seconds; null without one")),
        "process": maybe(ref("ProcessKpi", "its resources; null without a sample")),
    }


def crashes() -> dict[str, Schema]:
    """Fields of a worker or Dispatcher: the processes that it had."""
    return {
        "restarts": count(
            "times that it has crashed under this control plane; 0 again under the next one, and "
            "for a replica that an update or a restart has put in its place"
        ),
        "crash": maybe(
            ref("Crash", "its latest since restarts was 0; null without one, whatever was before")
        ),
        "crashes": listing(
            ref("Crash"),
            "the latest of all that had its name, those under earlier control planes and in "
            "replicas before it too, newest first",
        ),
    }


def manager() -> Schema:
    """Of the control plane's own process."""
    return obj(
        {
            "pid": count("its process id"),
            "since": text("when it started, UTC, ISO 8601"),
            "uptime_s": number("how long ago that was, seconds"),
            "restarts": count("control planes of this instance that died before it"),
            "cause": text("why the last one did; empty without one"),
            "away_ms": maybe(
                number(
                    "from that death (of one that had hung: from its last sign of life) until REST "
                    "answered again, ms; null without one"
                )
            ),
            "adopted": listing(TEXT, "processes that were taken over"),
        },
        description="The control plane's own process.",
    )
