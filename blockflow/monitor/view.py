"""Pure views: the control plane's JSON documents as lines of text, and the parts of them.

Nothing here reads sockets or clocks or prints. A missing figure is shown as ``-``: a monitor must
also show a system of which parts are down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.batching.options import stages_text
from blockflow.monitor.text import (
    age,
    amount,
    count,
    duration,
    is_number,
    size,
)

Doc = Mapping[str, Any]

_LOG_LINES = 3
"""Of a crash's log that are shown; REST has them all."""
_MOST_NAMES = 8
"""Of a kind in an update's answer; ``--json`` has them all."""


def listing(document: Any, key: str) -> list[Doc]:
    """The objects of a list that comes bare or under ``key``."""
    items = document.get(key) if isinstance(document, dict) else document
    return [i for i in items if isinstance(i, dict)] if isinstance(items, list) else []


def part(document: Any, key: str) -> Doc:
    """A member that is an object; empty when it is not there."""
    value = document.get(key) if isinstance(document, Mapping) else None
    return value if isinstance(value, Mapping) else {}


# --- the head ------------------------------------------------------------------------------------


def headline(status: Doc) -> str:
    """State, epoch, release and age on one line."""
    return (
        f"BlockFlow {status.get('release', '?')}: {status.get('state', '?')}"
        f", epoch {count(status.get('epoch'))}, up {age(status.get('uptime_s'))}"
        f", {_counted(listing(status, 'tasks'), 'task')}"
        f" on {_counted(listing(status, 'blocks'), 'block')}"
    )


def _counted(things: Sequence[Any], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def restarts(manager: Doc) -> list[str]:
    """What there is to say of control planes that have died; nothing before the first."""
    if not manager.get("restarts"):
        return []
    away = manager.get("away_ms")
    taken = manager.get("adopted")
    return [
        f"control plane restarted {count(manager.get('restarts'))} x, last {manager.get('since')} "
        f"({manager.get('cause')}): {len(taken) if isinstance(taken, list) else 0} processes "
        f"taken over after {f'{away / 1000:.1f} s' if is_number(away) else '-'}"
    ]


def notices(status: Doc) -> list[str]:
    """What a person should know first: why it is not ready, updates, crashes, warnings."""
    out = [f"not ready: {r}" for r in status.get("reasons") or []]
    out += [f"warning: {w}" for w in status.get("warnings") or []]
    out += restarts(part(status, "manager"))
    if status.get("monitor_hz") == 0:
        out.append("the monitor is off: counts and times are of before; blockflow monitor on")
    now, last = part(status, "updating"), part(status, "last_update")
    if now:
        out.append(f"update {now.get('id')} ({now.get('kind')}): {now.get('state')}")
    elif error := part(last, "error"):
        cause = f"{error.get('code')}: {error.get('message')}"
        out.append(f"update {last.get('id')} ({last.get('kind')}) failed: {cause}")
    for process in processes(status):
        if crash := part(process, "crash"):
            text = f"{process.get('name')} crashed {age(crash.get('age_s'))} ago"
            text += f": {crash.get('cause')}"
            if at_work := listing(crash, "work"):
                text += f", while it computed {', '.join(map(_work_text, at_work))}"
            if given_up := process.get("given_up"):
                text += f"; not restarted: {given_up}"
            out += [text, *_said(crash)]
    return out


def _said(crash: Doc) -> list[str]:
    """The lines of the log that say most: the last ones, and of a signal's report the first."""
    log = crash.get("log")
    lines = [str(line) for line in log if line] if isinstance(log, list) else []
    chosen = lines[:_LOG_LINES] if lines and _is_report(lines[0]) else lines[-_LOG_LINES:]
    return [f"    {line}" for line in chosen]


def _is_report(line: str) -> bool:
    return line.startswith("Fatal Python error: ")


def _work_text(work: Doc) -> str:
    """``trunk1 for 2 requests``."""
    number = work.get("requests")
    return f"{work.get('block')} for {count(number)} request{'' if number == 1 else 's'}"


def endpoints(status: Doc) -> list[str]:
    """Where the system listens."""
    out = [f"rest     {status['rest']}"] if status.get("rest") else []
    clients = status.get("clients") or part(status, "dispatcher").get("clients") or []
    return out + [f"clients  {address}" for address in clients]


def legs(status: Doc) -> list[str]:
    """How tensors went between clients and the Dispatcher; nothing before the first one."""
    kpi = part(part(status, "dispatcher"), "kpi")
    out = []
    for name, key in (("inputs", "in"), ("results", "out")):
        leg = part(part(kpi, "legs"), key)
        if leg.get("slot") or leg.get("message"):
            ways = (("by slot", "slot"), ("in messages", "message"))
            texts = [
                f"{amount(leg.get(k))} {text} ({size(leg.get(k + '_bytes'))})" for text, k in ways
            ]
            out.append(f"{name:<8} {', '.join(texts)}")
    granted = part(kpi, "grants")
    if granted.get("clients"):
        out.append(f"granted  {size(granted.get('bytes'))} to {count(granted['clients'])} clients")
    return out


def reruns(status: Doc) -> list[str]:
    """What became of requests whose worker died; nothing before the first one."""
    kpi = part(part(part(status, "dispatcher"), "kpi"), "recovery")
    named = (
        ("rerun", "run again"),
        ("waiting", "waiting for a worker"),
        ("poisoned", "poison"),
        ("budget_denied", "over the budget"),
        ("attempts_spent", "out of attempts or time"),
        ("not_replayable", "not replayable"),
    )
    texts = [f"{amount(kpi[key])} {text}" for key, text in named if kpi.get(key)]
    return [f"deaths   {', '.join(texts)}"] if texts else []


def slices(status: Doc) -> list[str]:
    """Workers whose policy takes several blocks for one stage, with the blocks of each."""
    out = []
    for worker in listing(status, "workers"):
        groups: dict[str, tuple[Doc, list[str]]] = {}
        for stage in listing(worker, "stages"):
            policy = part(stage, "batching")
            if isinstance(policy.get("stages"), list):
                same = groups.setdefault(str(policy), (policy, []))
                same[1].append(str(stage.get("block")))
        out += [
            f"stages   {worker.get('name')}: {stages_text(policy['stages'], blocks)}"
            for policy, blocks in groups.values()
        ]
    return out


def is_ready(status: Doc) -> bool:
    return status.get("ready") is True


# --- parts ---------------------------------------------------------------------------------------


def processes(status: Doc) -> list[Doc]:
    """Guardian, control plane, template, Dispatcher, workers, in this order."""
    control = part(status, "control")
    out: list[Doc] = []
    if control:
        own, manager = part(control, "process"), part(status, "manager")
        pid = manager.get("pid") or own.get("pid") or status.get("pid")
        if pid != status.get("pid"):  # the process to signal is another one, of no figures
            out.append({"name": "guardian", "state": "running", "pid": status.get("pid")})
        out.append(
            {
                "name": "control",
                "state": status.get("state"),
                "pid": pid,
                "process": own,
                "uptime_s": manager.get("uptime_s", status.get("uptime_s")),
            }
        )
    template = part(control, "template")
    if template.get("pid"):
        out.append(
            {"name": "template", "state": "warm", "pid": template["pid"], "process": template}
        )
    if dispatcher := part(status, "dispatcher"):
        out.append(dispatcher)
    return out + listing(status, "workers")


def path_text(task: Doc) -> str:
    """``trunk > head``; a task that cannot run now is marked."""
    text = " > ".join(str(b) for b in task.get("path") or [])
    missing = task.get("missing")
    return f"{text} (down: {', '.join(map(str, missing))})" if missing else text


def recent_mean(kpi: Doc, before: Doc | None, name: str) -> float | None:
    """Mean in ms of one time over what happened since ``before``; since the start without it."""
    now = part(kpi, name)
    if not before:
        return now.get("mean_ms") if now.get("count") else None
    return _mean_since(now, part(before, name), "sum_ms", "count")


def without_the_gone(block: str, before: Doc, status: Doc) -> Doc:
    """A block's figures in a former document, without those of replicas that have ended since: a
    mean over what has happened would be taken from sums that they are no part of any more."""
    alive = {w.get("pid") for w in listing(status, "workers")}
    ended = [w for w in listing(before, "workers") if w.get("pid") not in alive]
    lost = [part(s, "kpi") for w in ended for s in listing(w, "stages") if s.get("block") == block]
    found = next((part(b, "kpi") for b in listing(before, "blocks") if b.get("name") == block), {})
    return _less(found, lost) if lost else found


def _less(kpi: Doc, lost: list[Doc]) -> Doc:
    """The sums of some figures, and of the parts among them, less those of others."""
    out: dict[str, Any] = {}
    for name, value in kpi.items():
        if isinstance(value, Mapping):
            out[name] = _less(value, [part(one, name) for one in lost])
        elif is_number(value):
            out[name] = value - sum(n for one in lost if is_number(n := one.get(name)))
    return out


def recent_batch(kpi: Doc, before: Doc | None) -> float | None:
    """Mean rows per batch, as :func:`recent_mean`."""
    if not before:
        return kpi.get("mean_batch_rows") if kpi.get("batches") else None
    return _mean_since(_all_rows(kpi), _all_rows(before), "rows", "batches")


def _all_rows(kpi: Doc) -> Doc:
    """With those that failed: their batches count, too."""
    rows, failed = kpi.get("rows"), kpi.get("failed_rows")
    return {**kpi, "rows": rows + failed} if is_number(rows) and is_number(failed) else kpi


def _mean_since(now: Doc, before: Doc, total: str, number: str) -> float | None:
    total_now, n_now = now.get(total), now.get(number)
    total_before, n_before = before.get(total), before.get(number)
    if not (is_number(total_now) and is_number(n_now)):
        return None
    if not (is_number(total_before) and is_number(n_before)) or n_now < n_before:
        total_before, n_before = 0, 0  # the worker is a new one: all of it is recent
    return (total_now - total_before) / (n_now - n_before) if n_now > n_before else None


# --- lines of single commands --------------------------------------------------------------------


def ping_lines(answer: Any) -> list[str]:
    """One line per process."""
    found = listing(answer, "pings")
    width = max((len(str(a.get("worker"))) for a in found), default=0)
    return [
        f"{a.get('worker')!s:<{width}}  "
        + (f"{duration(a.get('rtt_ms'))}  {a.get('state', '')}" if a.get("ok") else "no answer")
        for a in found
    ] or ["no process to ask"]


def ping_ok(answer: Any) -> bool:
    """True when every process asked has answered."""
    return all(a.get("ok") is True for a in listing(answer, "pings"))


def update_lines(answer: Doc) -> list[str]:
    """What an update did, or would do."""
    update = part(answer, "update")
    plan = part(update, "plan") or part(answer, "plan")
    out = []
    if update:
        took = f" in {duration(update.get('duration_ms'))}" if update.get("duration_ms") else ""
        out.append(f"update {update.get('id')}: {update.get('state')}{took}")
    else:
        changes = answer.get("changed") is not False
        out.append("not applied; it would" if changes else "nothing would change")
    for verb in ("start", "keep", "stop"):
        names = [n.get("replica") if isinstance(n, Mapping) else n for n in plan.get(verb) or []]
        if names:
            out.append(f"  {verb:<6} {_some(names)}")
    if wide := [f"{w} {n}" for w, n in part(plan, "threads").items() if is_number(n) and n > 1]:
        out.append(f"  threads {_some(wide)}")
    if several := [f"{w} {n}" for w, n in part(plan, "lanes").items() if is_number(n) and n > 1]:
        out.append(f"  lanes   {_some(several)}")
    for verb, names in part(plan, "tasks").items():
        if names:
            out.append(f"  tasks  {verb} {_some(names)}")
    out += [f"  note   {n}" for n in update.get("notes") or []]
    would_be = "it would be " if not update and answer.get("changed") else ""
    return [*out, f"{would_be}epoch {count(answer.get('epoch'))}"]


def _some(names: Sequence[Any]) -> str:
    """The first of them, and how many more there are: a topology may have thousands."""
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(str, names[:_MOST_NAMES])) + more


def timing_lines(result: Any) -> list[str]:
    """Where one answer's time went; ``result`` is a client Result."""
    width = max(5, *(len(t.block) for t in result.timings), 5)
    out = [f"{'block':<{width}}  transit     wait  overhead  compute  ms"]
    out += [
        f"{t.block:<{width}}  {t.transit_ms:7.3f}  {t.wait_ms:7.3f}  {t.overhead_ms:8.3f}"
        f"  {t.compute_ms:7.3f}"
        for t in result.timings
    ]
    out.append(
        f"at the Dispatcher {result.total_ms:.3f} ms (in {result.ingress_ms:.3f}, out "
        f"{result.egress_ms:.3f}), round trip {result.rtt_ms:.3f} ms"
    )
    legs = (("to the Dispatcher", result.upload), ("back", result.download))
    return [*out, "; ".join(f"{where} {_leg(leg)}" for where, leg in legs)]


def _leg(leg: Any) -> str:
    took = f" in {leg.ms:.3f} ms" if leg.ms is not None else ""
    return f"{size(leg.nbytes)} by {leg.way}{took}"
