"""Figures: the schemas of KPIs: of stages and processes from the very records that are measured, of
the Dispatcher as ``dispatcher/stats.py`` and its gauges make them."""

from __future__ import annotations

from blockflow.control.kpis import PROCESS_NOW, PROCESS_SUMS, SUMS, TIMES
from blockflow.control.rest.shapes import (
    COUNT,
    Schema,
    count,
    listing,
    mapping,
    maybe,
    number,
    obj,
    properties,
    ref,
    said,
    text,
)
from blockflow.core.metrics import ProcessKpi, StageKpi

_TIMES = ref("TimeSummary")
_OF_BLOCK = (*SUMS, "rho", "mean_batch_rows", *TIMES, "device")
"""What is told of a block over its replicas."""


def figures() -> dict[str, Schema]:
    """Named schemas of all figures."""
    stage, process = properties(StageKpi, _TIMES), properties(ProcessKpi, _TIMES)
    return {
        "TimeSummary": _time_summary(),
        "StageKpi": obj(
            {},
            stage,
            description="One stage since its process started; rates over the last "
            "seconds. Empty until a first sample has come; rates and queues are left out where the "
            "latest one is older than those seconds (the monitor is off).",
        ),
        "BlockKpi": obj(
            {},
            {name: stage[name] for name in _OF_BLOCK},
            description="A block over its replicas: counts and rates are sums, rho is lam / mu of "
            "the sums; p50 and p90 are means weighted by count, p99 and max the worst replica's. "
            "Empty until a first sample has come; rates and queues are left out as in StageKpi.",
        ),
        "ProcessKpi": obj(
            {name: of for name, of in process.items() if name not in PROCESS_NOW},
            {name: of for name, of in process.items() if name in PROCESS_NOW},
            description="One process's resources. What is of the last seconds (cpu, clocks, the "
            "GPU's load, temperature and power) is left out where the latest sample is older than "
            "those; the rest is of that sample.",
        ),
        "Totals": obj(
            {name: process[name] for name in PROCESS_SUMS if name not in PROCESS_NOW},
            {name: process[name] for name in PROCESS_SUMS if name in PROCESS_NOW},
            description="Sums over the workers and the Dispatcher: cpu_percent over those whose "
            "latest sample is of the last seconds, and left out where there is none.",
        ),
        "TaskKpi": _task(),
        "DispatcherKpi": _dispatcher(),
        "Control": obj(
            {
                "process": ref("ProcessKpi", "the Manager's process"),
                "template": said(
                    "the process that workers are forked from",
                    obj(
                        {
                            "pid": maybe(count("process id; null without a template")),
                            "uss": count("private memory, bytes"),
                            "pss": count("proportional share of resident memory, bytes"),
                        }
                    ),
                ),
            },
            description="Resources of the control plane's own processes, sampled at most once a "
            "second.",
        ),
        "ProcessFigures": obj(
            {"name": text("the process: trunk1#0, or dispatcher"), "state": text("its state")},
            {
                "incarnation": count("number of this life of it; never used again"),
                "kpi_age_s": maybe(number("seconds since its latest sample; null without one")),
                "process": maybe(ref("ProcessKpi", "its resources; null without a sample")),
                "stages": listing(ref("StageView"), "of a worker: its stages"),
                "kpi": ref("DispatcherKpi", "of the Dispatcher: its figures"),
            },
            description="A process with its latest figures.",
        ),
        "Kpis": obj(
            {
                "epoch": count("the epoch in force"),
                "monitor_hz": number("samples per second of every process; 0 = off"),
                "blocks": listing(
                    obj({"name": text("the block"), "kpi": ref("BlockKpi")}), "by block"
                ),
                "tasks": listing(obj({"name": text("the task"), "kpi": ref("TaskKpi")}), "by task"),
                "workers": listing(ref("ProcessFigures"), "by worker process"),
                "dispatcher": ref("ProcessFigures"),
                "totals": ref("Totals"),
                "control": ref("Control"),
            },
            description="The latest figures of everything.",
        ),
    }


def _time_summary() -> Schema:
    return obj(
        {},
        {
            "count": count("how many were timed"),
            "mean_ms": number("mean, ms"),
            "p50_ms": number("median, ms"),
            "p90_ms": number("90th percentile, ms"),
            "p99_ms": number("99th percentile, ms"),
            "max_ms": number("longest, ms"),
            "sum_ms": number("sum, ms"),
        },
        description="Times since the process started; all 0 where nothing was timed. Percentiles "
        "are exact to 1/16. Empty where the time does not exist (device, on the CPU).",
    )


def _codes(about: str) -> Schema:
    return mapping(COUNT, f"{about}, by error code")


def _task() -> Schema:
    counted = {
        "ok": count("results"),
        "failed": _codes("admitted requests that ended with an error"),
        "latency": said("from the receipt of a request to the encoding of its reply", _TIMES),
    }
    return obj(
        {},
        {
            "requests": count("requests admitted"),
            "rows": count("rows of these"),
            "rejected": _codes("requests refused"),
            "per_s": number(
                "results per second, over the last seconds; left out where all samples are older"
            ),
            "limit": count("credits in force for it"),
            **counted,
            "ingress": said("until the input was on its way to the first block", _TIMES),
            "egress": said("from the last block's stamp to the encoding of the reply", _TIMES),
            "variants": mapping(
                obj({"answered": count("results and errors"), **counted}),
                "answers by way, stable and canary, since the canary's path was published; empty "
                "without a canary",
            ),
        },
        description="A task since the Dispatcher started, as the Dispatcher saw it. Empty until a "
        "first sample has come.",
    )


def _leg(about: str) -> Schema:
    return said(
        about,
        obj(
            {
                "slot": count("tensors that went through granted memory"),
                "slot_bytes": count("bytes of these"),
                "message": count("tensors that went in messages"),
                "message_bytes": count("bytes of these"),
                "copies": count("copies that the Dispatcher itself made"),
            }
        ),
    )


def _dispatcher() -> Schema:
    return obj(
        {},
        {
            "state": text("running, draining or stopping"),
            "epoch": count("the epoch that its routes belong to"),
            "version": count("version of its routes"),
            "tasks": mapping(ref("TaskKpi"), "figures by published task"),
            "rejected": _codes("requests refused, those that name no task among them"),
            "events": mapping(
                COUNT,
                "what went wrong at the sockets: malformed_client, malformed_data, "
                "unreadable_data, client_gone, slow_client, defects",
            ),
            "inflight": count("requests in flight"),
            "inflight_bytes": count("bytes of inputs that are kept for them"),
            "dropped": mapping(COUNT, "messages that changed nothing, by reason"),
            "recovery": said("what became of requests whose worker died", _recovery()),
            "result_memory": said("results kept for requests that are sent again", _memory()),
            "backlog_bytes": count("bytes of replies that clients have not taken yet"),
            "evicted": count("clients that were cut off because they did not read"),
            "turned_away": count("connections ended because there were too many"),
            "unread": count("connections ended because too much that they sent was unread"),
            "admission": said(
                "who is let in",
                obj(
                    {
                        "credits": count("requests that may be in flight at most"),
                        "refused": mapping(
                            COUNT,
                            "refusals by reason: credits, client, memory, rows, limit, share, "
                            "deadline, edge, waiting",
                        ),
                    }
                ),
            ),
            "withdrawn": count("requests that nobody waits for, counted per worker that was told"),
            "legs": said(
                "tensors between clients and the Dispatcher",
                obj({"in": _leg("inputs admitted"), "out": _leg("results made ready")}),
            ),
            "grants": said(
                "memory granted to clients on this host",
                obj(
                    {
                        "clients": count("clients that have some"),
                        "segments": count("segments"),
                        "bytes": count("bytes of these"),
                        "events": mapping(COUNT, "what went wrong: malformed, refused, silent"),
                    }
                ),
            ),
            "cpu_latency": said(
                "what requests under way ask of idle cores",
                obj(
                    {
                        "held_us": maybe(count("they wake within so many us; null: as usual")),
                        "trouble": text("why the kernel cannot be asked; empty: it can"),
                    }
                ),
            ),
        },
        description="The Dispatcher since it started. Empty until a first sample has come.",
    )


def _recovery() -> Schema:
    return obj(
        {
            "rerun": count("attempts beyond the first"),
            "parked": count("of these, those that had to wait for a replacement"),
            "poisoned": count("requests ended as POISON"),
            "budget_denied": count("re-runs that the budget did not allow"),
            "attempts_spent": count("requests that had no attempt, or no time, left"),
            "not_replayable": count("requests at a block that must not run twice"),
            "parked_new": count("requests that had to wait before their first attempt"),
            "waiting": count("requests that wait for a replacement now"),
            "suspects": count("requests that are run alone now, since a worker died with them"),
            "budget": count("re-runs that the budget allows now"),
        }
    )


def _memory() -> Schema:
    return obj(
        {"results": count("results kept now"), "bytes": count("bytes of these")},
        {
            "remembered": count("results kept, ever"),
            "answered": count("requests answered from it"),
            "attached": count("requests attached to the run in flight"),
            "forgotten": count("results dropped before their time"),
            "too_large": count("results too large to keep"),
        },
    )
