"""Report of a call: Markdown and HTML from its document, with plots beside them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockflow.bench.canvas import new_page, save_page
from blockflow.bench.mlperf.document import digests
from blockflow.bench.mlperf.job import disk, write_json
from blockflow.bench.mlperf.run import ScenarioResult

SUMMARY, MARKDOWN, HTML = "summary.json", "report.md", "report.html"

_COLOURS = ("#17779b", "#e4572e", "#6a994e", "#5a4a78", "#f2b134")
_POINTS = 1001
"""Of a curve: a run may have millions of samples."""

_PARTS = ("transit", "wait", "overhead", "compute")

SHORT_NOTE = (
    "Short runs, for development: shorter than the rules want, or with fewer queries. "
    "Not an MLPerf result."
)
OFFICIAL_NOTE = (
    "Durations and query counts of the rules. Not reviewed by MLCommons: not an MLPerf result."
)


@dataclass(frozen=True, slots=True)
class Table:
    """A title, heads and rows of text."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A title and a file beside the report."""

    title: str
    file: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    text: str


Part = Table | Picture | Text


def write_report(document: Mapping[str, Any], results: Sequence[ScenarioResult], out: Path) -> None:
    """Write the summary, the plots, the Markdown and the HTML into ``out``.

    Raises:
        SystemError_: NO_SPACE; MISSING_EXTRA without matplotlib.
    """
    with disk(out):
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / SUMMARY, document)  # first: what follows can be made again from it
        pictures = draw(results, out)
        parts = sections(document, pictures)
        (out / MARKDOWN).write_text(to_markdown(parts), encoding="utf-8")
        (out / HTML).write_text(to_html(parts), encoding="utf-8")


# --- what it says --------------------------------------------------------------------------------


def sections(document: Mapping[str, Any], pictures: Sequence[Picture] = ()) -> list[Part]:
    """The report's parts, in order."""
    found: list[Part] = [Text(OFFICIAL_NOTE if document["official"] else SHORT_NOTE)]
    if document["partial"]:
        found.append(Text(f"PARTIAL: {document['error']['code']}: {document['error']['message']}"))
    found.append(_verdicts(document))
    reasons = [(_name(r), reason) for r in document["results"] for reason in r["reasons"]]
    if reasons:
        found.append(Table("What stands against a verdict", ("run", "reason"), reasons))
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
        found.append(Table("Accuracy", heads, accuracies))
    found += [_search(r) for r in document["results"] if r["search"]]
    timed = [r for r in document["results"] if r["mode"] == "performance"]
    found += [_blocks(r) for r in timed if r["blocks"]]
    found += pictures
    found += [_setting(document), _machine(document)]
    return found


def _name(result: Mapping[str, Any]) -> str:
    mode = result["mode"]
    return result["scenario"] + ("" if mode == "performance" else f" ({mode})")


def _verdicts(document: Mapping[str, Any]) -> Table:
    rows = []
    for r in document["results"]:
        metric, samples = r["metric"], r["samples"]
        # A server's result is the rate that was offered, not what came back of it.
        value = f"{metric['name']} {metric['value']:.4g} {metric['unit']}" if metric else ""
        if r["scenario"] == "server" and r["mode"] == "performance":
            value = f"{r['settings']['rate']:.4g} queries/s offered; {value}"
        latency = r["latency_ms"]
        kind = "partial" if r["partial"] else "official" if r["official"] else "short"
        rows.append(
            (
                _name(r),
                r["verdict"],
                kind,
                value,
                *(f"{latency[p]:.3f}" if p in latency else "" for p in ("50.00", "90.00", "99.00")),
                str(samples["issued"]),
                str(sum(samples["failed"].values()) + samples["lost"]),
            )
        )
    heads = ("run", "verdict", "kind", "result", "p50 ms", "p90 ms", "p99 ms", "samples", "failed")
    return Table("Verdicts of LoadGen", heads, rows)


def _search(result: Mapping[str, Any]) -> Table:
    rows = [
        (
            f"{run['rate']:.4g}",
            run["verdict"],
            f"{run['latency_ms']['99.00']:.3f}" if "99.00" in run["latency_ms"] else "",
            "; ".join(run["reasons"]),
            run["folder"],
        )
        for run in result["search"]
    ]
    return Table(
        "Search for the highest VALID rate",
        ("queries/s", "verdict", "p99 ms", "reasons", "logs"),
        rows,
    )


def _blocks(result: Mapping[str, Any]) -> Table:
    rows = [
        (b["block"], str(b["count"]), *(f"{b[f'{part}_ms']:.3f}" for part in _PARTS))
        for b in result["blocks"]
    ]
    title = f"Where the time went, {_name(result)}: means per request"
    return Table(title, ("block", "requests", *(f"{p} ms" for p in _PARTS)), rows)


def _setting(document: Mapping[str, Any]) -> Table:
    plan = document["plan"]
    rows = [("command", document["command"])]
    rows += [(f"data, {t}", d["origin"]) for t, d in document["data"].items()]
    weights = ", ".join(f"{t}={w}" for t, w in plan["weights"].items())
    rows += [("tasks by weight", weights), ("seed", str(plan["seed"]))]
    for r in document["results"]:
        s = r["settings"]
        wanted = f"at least {s['min_duration_s']:g} s and {s['min_queries']} queries"
        bounds = [
            f"{task}: p{t['percentile'] * 100:g} <= {t['latency_ms']:g} ms"
            for task, t in s["targets"].items()
            if t["latency_ms"] is not None
        ]
        rows.append((_name(r), "; ".join([wanted, *bounds])))
    return Table("What was asked", ("", ""), rows)


def _machine(document: Mapping[str, Any]) -> Table:
    rows = [(name, str(value)) for name, value in document["machine"].items() if value]
    for name, route in document["system"].get("tasks", {}).items():
        rows.append((f"task {name}", " → ".join(route["path"])))
    rows += [(f"block {name}", digest) for name, digest in digests(document).items()]
    return Table("Machine, versions and blocks", ("", ""), rows)


# --- how it is written ---------------------------------------------------------------------------

_TITLE = "BlockFlow bench: report"


def to_markdown(parts: Sequence[Part]) -> str:
    """The report as Markdown."""
    lines = [f"# {_TITLE}", ""]
    for part in parts:
        match part:
            case Text(text):
                lines += [text, ""]
            case Picture(title, file):
                lines += [f"## {title}", "", f"![{title}]({file})", ""]
            case Table(title, heads, rows):
                lines += [f"## {title}", "", _row(heads), "|" + "---|" * len(heads)]
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


def to_html(parts: Sequence[Part]) -> str:
    """The report as one HTML page; whatever comes from outside is escaped."""
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{_TITLE}</title><style>{_STYLE}</style></head><body><h1>{_TITLE}</h1>",
    ]
    for part in parts:
        match part:
            case Text(text):
                lines.append(f"<p>{html.escape(text)}</p>")
            case Picture(title, file):
                lines.append(f"<h2>{html.escape(title)}</h2>")
                lines.append(f'<img src="{html.escape(file)}" alt="{html.escape(title)}">')
            case Table(title, heads, rows):
                lines.append(f"<h2>{html.escape(title)}</h2><table>")
                lines.append(_html_row(heads, "th"))
                lines += [_html_row(r, "td") for r in rows]
                lines.append("</table>")
    return "\n".join([*lines, "</body></html>"]) + "\n"


def _html_row(cells: Sequence[str], kind: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(c)}</{kind}>" for c in cells) + "</tr>"


# --- the plots -----------------------------------------------------------------------------------


def draw(results: Sequence[ScenarioResult], out: Path) -> list[Picture]:
    """Latency by share of the samples, p99 by rate where it was searched, time per block."""
    found = []
    timed = [r for r in results if r.result.settings.mode == "performance"]
    if any(r.result.latencies for r in timed):
        save_page(_latency_page(timed), out / "latency.png")
        found.append(Picture("Latency: share of samples answered within", "latency.png"))
    searched = [r for r in timed if r.search]
    if searched:
        save_page(_rate_page(searched), out / "rate.png")
        found.append(Picture("p99 latency by rate", "rate.png"))
    if any(r.result.blocks for r in timed):
        save_page(_block_page(timed), out / "blocks.png")
        found.append(Picture("Time per block", "blocks.png"))
    return found


def _latency_page(results: Sequence[ScenarioResult]) -> Any:
    page = new_page(8, 4.5)
    axes = page.subplots()
    for r, colour in zip(results, _COLOURS, strict=False):
        for task, style in zip(r.result.latencies, ("-", "--", ":", "-."), strict=False):
            if not len(r.result.latencies[task]):
                continue
            shares = np.linspace(0, 1, _POINTS)
            samples = np.quantile(r.result.latencies[task], shares, method="inverted_cdf")
            label = f"{r.result.settings.scenario}, {task}"
            axes.step(samples, shares, style, color=colour, label=label, where="post")
    axes.set(xscale="log", xlabel="ms from LoadGen's call to the response", ylabel="share")
    axes.set_ylim(0, 1.01)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return page


def _rate_page(results: Sequence[ScenarioResult]) -> Any:
    page = new_page(8, 4.5)
    axes = page.subplots()
    for r in results:
        runs = sorted(r.search, key=lambda run: run.settings.rate)
        seen = [run for run in runs if "99.00" in run.verdict.latency_ms]
        xs = [run.settings.rate for run in seen]
        axes.plot(xs, [run.verdict.latency_ms["99.00"] for run in seen], "-", color="#bdbdbd")
        for valid, colour, word in ((True, _COLOURS[0], "VALID"), (False, _COLOURS[1], "INVALID")):
            some = [run for run in seen if run.verdict.valid is valid]
            axes.plot(
                [run.settings.rate for run in some],
                [run.verdict.latency_ms["99.00"] for run in some],
                "o",
                color=colour,
                label=word,
            )
        bound = r.result.settings.bound_ms
        if bound is not None:
            axes.axhline(bound, color="black", linestyle=":", label=f"bound {bound:g} ms")
    axes.set(xlabel="queries per second offered", ylabel="p99 ms", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)
    return page


def _block_page(results: Sequence[ScenarioResult]) -> Any:
    """A part of the page per scenario: their times may be orders of magnitude apart."""
    shown = [r.result for r in results if r.result.blocks]
    counts = [len(r.blocks) for r in shown]
    page = new_page(8, 1.0 * len(shown) + 0.3 * sum(counts))
    rows = page.subplots(len(shown), 1, squeeze=False, height_ratios=counts)
    for (axes,), result in zip(rows, shown, strict=True):
        names = [b.block for b in result.blocks]
        left = [0.0] * len(names)
        for part, colour in zip(_PARTS, _COLOURS, strict=False):
            widths = [float(getattr(b, f"{part}_ms")) for b in result.blocks]
            axes.barh(names, widths, left=left, color=colour, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        axes.set_title(str(result.settings.scenario), loc="left", fontsize=9)
    rows[-1][0].set(xlabel="mean ms per request")
    rows[0][0].legend(fontsize=8, frameon=False, ncols=len(_PARTS))
    return page
