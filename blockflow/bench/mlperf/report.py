"""Report of a call: Markdown and HTML from its document, with plots beside them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockflow.bench.calibration import Steadiness
from blockflow.bench.grid import Grid, Rows
from blockflow.bench.mlperf.asked import asked_text
from blockflow.bench.mlperf.document import digests
from blockflow.bench.mlperf.job import ACCURACY_LOG, disk, write_json
from blockflow.bench.mlperf.pictures import PARTS, draw
from blockflow.bench.mlperf.result import ScenarioResult
from blockflow.bench.mlperf.settings import Mode
from blockflow.bench.numerals import given, plain

SUMMARY, MARKDOWN, HTML = "summary.json", "report.md", "report.html"

SHORT_NOTE = (
    "Short runs, for development: shorter than the rules want, or with fewer queries. "
    "Not an MLPerf result."
)
FULL_NOTE = (
    "Durations and query counts of the rules, but a lower percentile, a looser bound or another "
    "number of samples per query: see what was asked. Not an MLPerf result."
)
OFFICIAL_NOTE = (
    "Durations, query counts, percentiles and bounds of the rules. Not "
    "reviewed by MLCommons: not an MLPerf result."
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A title and a file beside the report."""

    title: str
    file: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True, slots=True)
class Heading:
    """Of a section that has tables and pictures of its own."""

    text: str


Part = Grid | Picture | Text | Heading


def write_summary(document: Mapping[str, Any], out: Path) -> None:
    """Write the summary into ``out``, in the place of any older one; a report that lies there is
    older, too, and goes.

    Raises:
        BlockFlowError: NO_SPACE; INVALID_REQUEST where ``out`` cannot be written.
    """
    with disk(out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / SUMMARY, document)
        for name in (MARKDOWN, HTML):
            (out / name).unlink(missing_ok=True)


def write_report(document: Mapping[str, Any], results: Sequence[ScenarioResult], out: Path) -> None:
    """Write the summary, the plots, the Markdown and the HTML into ``out``.

    Raises:
        SystemError_: NO_SPACE; MISSING_EXTRA without matplotlib.
    """
    write_summary(document, out)  # first: what follows can be made again from it
    with disk(out):
        pictures = [Picture(*drawn) for drawn in draw(results, out)]
        parts = sections(document, pictures)
        (out / MARKDOWN).write_text(to_markdown(parts), encoding="utf-8")
        (out / HTML).write_text(to_html(parts), encoding="utf-8")


# --- what it says --------------------------------------------------------------------------------


def sections(document: Mapping[str, Any], pictures: Sequence[Picture] = ()) -> list[Part]:
    """The report's parts, in order."""
    note = FULL_NOTE if document["full_length"] else SHORT_NOTE
    found: list[Part] = [Text(OFFICIAL_NOTE if document["official"] else note)]
    if document["partial"]:
        found.append(Text(f"PARTIAL: {document['error']['code']}: {document['error']['message']}"))
    found.append(_verdicts(document))
    found += [Text(text) for text in map(_failed, document["results"]) if text]
    found += [Text(_found(r)) for r in document["results"] if r["found"] is not None]
    found += [Text(_repeated(r)) for r in document["results"] if r.get("least_of", 1) > 1]
    if any(r["tasks"] for r in document["results"]):
        found.append(_targets(document))
    reasons = [(_name(r), reason) for r in document["results"] for reason in r["reasons"]]
    if reasons:
        found.append(Grid("What stands against a verdict", ("run", "reason"), reasons))
    accuracies = [
        (
            r["scenario"],
            a["task"],
            f"{a['top1']:.2%}",
            "" if a["top5"] is None else f"{a['top5']:.2%}",
            str(a["rows"]),
            str(a["missing"]),
        )
        for r in document["results"]
        for a in r["accuracy"]
    ]
    if accuracies:
        heads = ("scenario", "task", "top-1", "top-5", "rows", "without answer")
        found.append(Grid("Accuracy", heads, accuracies))
    untold = (_untold(r, document["data"]) for r in document["results"])
    found += [Text(text) for text in untold if text]
    if document["validation"]:
        found.append(_validation(document))
    found += [_search(r) for r in document["results"] if r["search"]]
    timed = [r for r in document["results"] if r["mode"] == "performance"]
    found += [_blocks(r) for r in timed if r["blocks"]]
    found += [_batches(r) for r in timed if r["batches"]]
    found += pictures
    found += [_setting(document), _machine(document)]
    return found


def _untold(result: Mapping[str, Any], data: Mapping[str, Mapping[str, Any]]) -> str:
    """What an accuracy run cannot tell; '' of other runs, and where every task has labels."""
    unknown = [task for task, one in data.items() if not one["labels"]]
    if result["mode"] != Mode.ACCURACY or result["broke_off"] or not unknown:
        return ""
    return (
        f"{_name(result)}: the data have no labels for {', '.join(unknown)}, so there is no "
        f"accuracy to tell; the answers are in {result['folder']}/{ACCURACY_LOG}."
    )


def _name(result: Mapping[str, Any]) -> str:
    mode = result["mode"]
    return result["scenario"] + ("" if mode == "performance" else f" ({mode})")


def _unanswered(result: Mapping[str, Any]) -> int:
    return int(sum(result["samples"]["failed"].values()) + result["samples"]["lost"])


def _failed(result: Mapping[str, Any]) -> str:
    """What the figures of a run are of that has failed samples among its own; '' of others."""
    count, issued = _unanswered(result), result["samples"]["issued"]
    if result["mode"] == Mode.ACCURACY or not count:
        return ""
    return (
        f"{_name(result)}: {count:,} of {issued:,} samples were not answered. A rate counts the "
        "answered ones alone; latencies, also each task's, are of all that ended, and a failure "
        "that comes at once makes them look lower."
    )


def _verdicts(document: Mapping[str, Any]) -> Grid:
    rows = Rows()
    for r in document["results"]:
        metric, samples = r["metric"], r["samples"]
        # A server's result is the rate that was offered, not what came back of it.
        value = f"{metric['name']} {plain(metric['value'])} {metric['unit']}" if metric else ""
        if metric and r.get("estimate_ms") is not None:
            value += f" (with 99% confidence at most {plain(r['estimate_ms'])} ms)"
        if r["scenario"] == "server" and r["mode"] == "performance":
            value = f"{plain(r['settings']['rate'])} queries/s offered; {value}"
        latency = r["latency_ms"]
        rows.row(
            _name(r),
            r["verdict"],
            r["kind"],
            value,
            *(f"{latency[p]:.3f}" if p in latency else "" for p in ("50.00", "90.00", "99.00")),
            str(samples["issued"]),
            str(_unanswered(r)),
        )
    heads = ("run", "verdict", "kind", "result", "p50 ms", "p90 ms", "p99 ms", "samples", "failed")
    return Grid("Verdicts of LoadGen", heads, rows)


def _targets(document: Mapping[str, Any]) -> Grid:
    rows = [
        (
            _name(r),
            t["task"],
            t["verdict"],
            _ms(t["seen_ms"]),
            f"{100 * t['percentile']:g}",
            "" if t["bound_ms"] is None else given(t["bound_ms"]),
            str(t["samples"]),
            str(t["queries"]),
            str(t["needed"]),
        )
        for r in document["results"]
        for t in r["tasks"]
    ]
    numbers = ("percentile", "bound ms", "samples", "queries", "needed")
    return Grid("Each task's target", ("run", "task", "verdict", "seen ms", *numbers), rows)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _found(result: Mapping[str, Any]) -> str:
    """What a search has found out, and what it has not."""
    found, rate = result["found"], f"{plain(result['settings']['rate'])} queries/s"
    if result["broke_off"]:
        good = [run["rate"] for run in result["search"] if run["verdict"] == "VALID"]
        best = f"{plain(max(good))} queries/s was VALID" if good else "none was VALID"
        return f"{_name(result)}: the search broke off; of its {len(result['search'])} runs {best}."
    if result["verdict"] != "VALID":
        probed = any(run["verdict"] == "VALID" for run in result["search"])
        whole = " in a run as long as was asked for" if probed else ""
        return f"{_name(result)}: no rate was found VALID{whole}; the result is a run at {rate}."
    if not found["bracketed"]:
        return (
            f"{_name(result)}: no INVALID rate was found: {rate} is not the highest. Let the "
            "search have more runs."
        )
    limit, within = f"{plain(found['invalid_at'])} was INVALID", f"{100 * found['precision']:.3g}%"
    if found["invalid_s"] is not None:
        limit += f" in a run of {given(found['invalid_s'])} s"
    if found["precise"]:
        return f"{_name(result)}: the highest VALID rate is {rate}, to within {within}: {limit}."
    best = f"{_name(result)}: the highest rate that was found VALID is {rate}; {limit}."
    if found["invalid_at"] <= result["settings"]["rate"] * (1 + found["precision"]):
        return f"{best} One of the two was found only once, and may be chance."
    return f"{best} The limit lies between them, and is not known to within {within} as asked."


def _repeated(result: Mapping[str, Any]) -> str:
    return (
        f"{_name(result)}: all of {result['least_of']} runs at "
        f"{plain(result['settings']['rate'])} queries/s were VALID; the result is the least."
    )


def _search(result: Mapping[str, Any]) -> Grid:
    rows = [
        (
            plain(run["rate"]),
            run["verdict"],
            run["kind"],
            "" if run["metric"] is None else plain(run["metric"]["value"]),
            _ms(run["judged_ms"]),
            "; ".join(run["reasons"]),
            run["folder"],
        )
        for run in result["search"]
    ]
    share = min(t["percentile"] for t in result["settings"]["targets"].values())
    heads = ("queries/s", "verdict", "kind", "completed/s", f"p{100 * share:g} ms")
    title = "Every run of the search" if result["found"] else "Every run at the rate"
    return Grid(title, (*heads, "reasons", "logs"), rows)


def _blocks(result: Mapping[str, Any]) -> Grid:
    rows = [
        (b["block"], str(b["count"]), *(f"{b[f'{part}_ms']:.3f}" for part in PARTS))
        for b in result["blocks"]
    ]
    title = f"Where the time went, {_name(result)}: means per request"
    return Grid(title, ("block", "requests", *(f"{p} ms" for p in PARTS)), rows)


def _batches(result: Mapping[str, Any]) -> Grid:
    rows = [
        (b["block"], str(b["batches"]), f"{b['mean']:.2f}", f"{max(b['looks'], default=0):.2f}")
        for b in result["batches"]
    ]
    heads = ("block", "batches", "mean rows", "highest mean of a second")
    return Grid(f"Batch sizes, {_name(result)}", heads, rows)


def _validation(document: Mapping[str, Any]) -> Grid:
    rows = [(v["test"], v["scenario"], v["outcome"], v["why"]) for v in document["validation"]]
    return Grid("Validation tests", ("test", "scenario", "outcome", "what was found"), rows)


def _setting(document: Mapping[str, Any]) -> Grid:
    plan = document["plan"]
    rows = [("command", document["command"])]
    rows += [(f"data, {t}", d["origin"]) for t, d in document["data"].items()]
    weights = ", ".join(f"{t}={w}" for t, w in plan["weights"].items())
    rows += [("tasks by weight", weights), ("seed", str(plan["seed"]))]
    for r in document["results"]:
        rows.append((_name(r), asked_text(r, document["data"])))
    return Grid("What was asked", ("", ""), rows)


def _machine(document: Mapping[str, Any]) -> Grid:
    rows = [(name, str(value)) for name, value in document["machine"].items() if value]
    if document["fixed_work"] is not None:
        name, _, told = Steadiness(**document["fixed_work"]).sentence().partition(": ")
        rows.append((name, told))
    for name, route in document["system"].get("tasks", {}).items():
        rows.append((f"task {name}", " → ".join(route["path"])))
    rows += [(f"block {name}", digest) for name, digest in digests(document).items()]
    return Grid("Machine, versions and blocks", ("", ""), rows)


# --- how it is written ---------------------------------------------------------------------------

_TITLE = "BlockFlow bench: report"


def to_markdown(parts: Sequence[Part], title: str = _TITLE) -> str:
    """The report as Markdown."""
    lines = [f"# {title}", ""]
    for part in parts:
        match part:
            case Heading(text):
                lines += [f"# {text}", ""]
            case Text(text):
                lines += [text, ""]
            case Picture(name, file):
                lines += [f"## {name}", "", f"![{name}]({file})", ""]
            case Grid(name, heads, rows):
                lines += [f"## {name}", "", _row(heads), "|" + "---|" * len(heads)]
                lines += [*(_row(r) for r in rows), ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    clean = (" ".join(c.split()).replace("|", "\\|") for c in cells)
    return "| " + " | ".join(clean) + " |"


_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}"
    "img{max-width:100%}"
)


def to_html(parts: Sequence[Part], title: str = _TITLE) -> str:
    """The report as one HTML page; whatever comes from outside is escaped."""
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
    ]
    for part in parts:
        match part:
            case Heading(text):
                lines.append(f"<h1>{html.escape(text)}</h1>")
            case Text(text):
                lines.append(f"<p>{html.escape(text)}</p>")
            case Picture(name, file):
                lines.append(f"<h2>{html.escape(name)}</h2>")
                lines.append(f'<img src="{html.escape(file)}" alt="{html.escape(name)}">')
            case Grid(name, heads, rows):
                lines.append(f"<h2>{html.escape(name)}</h2><table>")
                lines.append(_html_row(heads, "th"))
                lines += [_html_row(r, "td") for r in rows]
                lines.append("</table>")
    return "\n".join([*lines, "</body></html>"]) + "\n"


def _html_row(cells: Sequence[str], kind: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(c)}</{kind}>" for c in cells) + "</tr>"
