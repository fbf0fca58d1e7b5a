"""``blockflow bench``: the report, and batch sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlperf_documents import document, result, searched, target

from blockflow.bench.grid import Grid
from blockflow.bench.mlperf.batch_sizes import EVERY_S, BatchSizes, BatchWatch
from blockflow.bench.mlperf.report import (
    HTML,
    MARKDOWN,
    SUMMARY,
    Text,
    sections,
    to_html,
    to_markdown,
    write_report,
)
from blockflow.core.errors import make_error

# --- the report ----------------------------------------------------------------------------------


def test_a_report_escapes_what_comes_from_outside() -> None:
    parts = [Text("<b>"), Grid("t", ("a|b",), [("<script>\nx|y",)])]
    page = to_html(parts)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "| <script> x\\|y |" in to_markdown(parts)


def test_a_report_tells_verdicts_tests_blocks_and_batches() -> None:
    tables = {p.title: p for p in sections(document()) if isinstance(p, Grid)}
    assert [row[0] for row in tables["Verdicts of LoadGen"].rows] == [
        "single-stream",
        "server",
        "server (accuracy)",
    ]
    assert [row[2] for row in tables["Validation tests"].rows] == ["FAILED", "PASSED", "UNDECIDED"]
    assert tables["Batch sizes, server"].rows == [("trunk", "200", "3.50", "4.00")]
    assert tables["Where the time went, server: means per request"].rows
    machine = dict(tables["Machine, versions and blocks"].rows)
    assert machine["fixed work"] == "spread 3.0%, drift +2.0% from begin to end"


def test_a_picture_of_an_earlier_call_lies_beside_no_later_report(tmp_path: Path) -> None:
    (tmp_path / "rate.png").write_bytes(b"of a search")
    write_report(document(), [], tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [HTML, MARKDOWN, SUMMARY]


def test_a_report_says_how_sure_a_percentile_is() -> None:
    def told(**more: Any) -> str:
        parts = sections(document(results=[result("single-stream", **more)]))
        (table,) = [p for p in parts if isinstance(p, Grid) and p.title == "Verdicts of LoadGen"]
        return table.rows[0][3]

    assert told(estimate_ms=2.75) == "p90 latency 2.5 ms (with 99% confidence at most 2.75 ms)"
    assert told(estimate_ms=None) == told() == "p90 latency 2.5 ms"


def test_a_report_says_what_the_figures_of_a_run_with_failures_are_of() -> None:
    def said(**more: Any) -> list[str]:
        parts = sections(document(results=[result("server", **more)]))
        return [p.text for p in parts if isinstance(p, Text) and "not answered" in p.text]

    overloaded = {"issued": 1500, "failed": {"OVERLOADED": 1103}, "lost": 1}
    (text,) = said(samples=overloaded)
    assert text.startswith("server: 1,104 of 1,500 samples were not answered.")
    assert "latencies" in text
    assert not said(samples={"issued": 1500, "failed": {}, "lost": 0})
    assert not said(samples=overloaded, mode="accuracy")  # it has no latencies to tell


def test_large_figures_of_a_report_have_no_exponent() -> None:
    run = result("server", metric={"name": "completed", "value": 16823.4, "unit": "queries/s"})
    run["settings"] = {**run["settings"], "rate": 17000.0}
    text = to_markdown(sections(document(results=[{**run, **searched(invalid_at=17850.0)}])))
    assert "17000 queries/s offered; completed 16823 queries/s" in text
    assert "the highest VALID rate is 17000 queries/s, to within 5%: 17850 was INVALID" in text
    assert "e+0" not in text


@pytest.mark.parametrize(
    ("scenario", "mode", "asked"),
    [
        ("single-stream", "performance", "at least 5 s and 662 queries; a: p99 <= 15 ms"),
        ("server", "performance", "at least 5 s and 662 queries; a: p99 <= 15 ms"),
        (
            "multistream",
            "performance",
            "at least 5 s and 662 queries of 8 samples; a: p99 <= 15 ms",
        ),
        ("offline", "performance", "at least 5 s and 662 samples, in one query; a: p99 <= 15 ms"),
        ("server", "accuracy", "all data once: 364 rows"),
        ("multistream", "accuracy", "all data once: 364 rows, in whole queries of 8 samples"),
    ],
)
def test_a_report_says_what_was_asked_in_the_words_of_the_scenario(
    scenario: str, mode: str, asked: str
) -> None:
    data = {t: {"origin": "", "rows": n, "labels": True} for t, n in (("a", 360), ("b", 4))}
    parts = sections(document(results=[result(scenario, mode=mode)], data=data))
    (table,) = [p for p in parts if isinstance(p, Grid) and p.title == "What was asked"]
    assert table.rows[-1][1] == asked


def test_a_report_says_whose_accuracy_nobody_can_tell() -> None:
    def said(labels: bool, **more: Any) -> list[str]:
        run = result("server", mode="accuracy", folder="server-accuracy", **more)
        known = {"a": True, "b": labels}
        data = {t: {"origin": "", "rows": 4, "labels": has} for t, has in known.items()}
        parts = sections(document(results=[run], data=data))
        return [p.text for p in parts if isinstance(p, Text) and "no labels" in p.text]

    (text,) = said(labels=False)
    assert "no labels for b," in text
    assert "server-accuracy/mlperf_log_accuracy.json" in text
    assert not said(labels=True)
    assert not said(labels=False, broke_off=True)  # its log has no end


def test_a_report_says_what_its_rules_were() -> None:
    def said(**more: Any) -> str:
        first = sections(document(**more))[0]
        assert isinstance(first, Text)
        return first.text

    assert said().startswith("Short runs")
    assert "lower percentile" in said(full_length=True)
    assert "percentiles and bounds of the rules" in said(full_length=True, official=True)


def test_a_report_shows_each_tasks_own_target() -> None:
    tasks = [target("a", 15.0, 3.0), target("b", None, None, verdict="never asked", queries=0)]
    (run,) = [
        part
        for part in sections(document(results=[result("server", tasks=tasks)]))
        if isinstance(part, Grid) and part.title == "Each task's target"
    ]
    assert run.rows == [
        ("server", "a", "too few", "3.000", "99", "15", "700", "350", "662"),
        ("server", "b", "never asked", "", "99", "", "700", "0", "662"),
    ]


@pytest.mark.parametrize(
    ("verdict", "told", "said"),
    [
        ("VALID", {}, "the highest VALID rate is 120 queries/s, to within 5%: 126 was INVALID"),
        (
            "VALID",
            {"precise": False, "invalid_s": 20.0},
            "found VALID is 120 queries/s; 126 was INVALID in a run of 20 s. One of the two was",
        ),
        ("VALID", {"precise": False, "invalid_at": 200.0}, "200 was INVALID. The limit lies"),
        (
            "VALID",
            {"bracketed": False, "precise": False, "invalid_at": None},
            "no INVALID rate was found: 120 queries/s is not the highest",
        ),
        ("INVALID", {"bracketed": False, "precise": False}, "no rate was found VALID"),
    ],
)
def test_a_report_says_what_a_search_has_found(
    verdict: str, told: dict[str, Any], said: str
) -> None:
    answered = {"issued": 700, "failed": {}, "lost": 0}
    run = result("server", verdict=verdict, samples=answered, **searched(**told))
    parts = sections(document(results=[run]))
    (text,) = [p.text for p in parts if isinstance(p, Text) and p.text.startswith("server")]
    assert said in text
    assert ("the highest VALID rate" in text) is (verdict == "VALID" and not told)
    broke: dict[str, Any] = {"partial": True, "broke_off": True, "samples": answered}
    broken = result("server", verdict="INVALID", **broke, **searched())
    broken["search"] += [{**broken["search"][0], "rate": 60.0, "verdict": "VALID"}]
    (text,) = [
        p.text
        for p in sections(document(results=[broken]))
        if isinstance(p, Text) and p.text.startswith("server")
    ]
    assert text == "server: the search broke off; of its 2 runs 60 queries/s was VALID."
    (runs,) = [p for p in parts if isinstance(p, Grid) and "search" in p.title]
    assert "highest" not in runs.title
    assert runs.heads[4] == "p99 ms"
    assert runs.rows == [("126", "INVALID", "short", "119", "17.500", "late", "server-01")]


# --- batch sizes ---------------------------------------------------------------------------------


class Workers:
    """What REST tells of two replicas of a block, look by look: (requests, rows, batches) each."""

    def __init__(self, *looks: dict[str, tuple[int, int, int]]) -> None:
        self.looks = list(looks)

    def get(self, path: str) -> Any:
        if len(self.looks) == 1:
            raise make_error("NOT_RUNNING", "gone")
        counts = self.looks.pop(0)
        return {
            "workers": [
                {
                    "name": name,
                    "incarnation": 1,
                    "stages": [
                        {
                            "block": "trunk",
                            "kpi": dict(zip(("requests", "rows", "batches"), c, strict=True)),
                        },
                        {"block": "idle", "kpi": {}},
                    ],
                }
                for name, c in counts.items()
            ]
        }

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        raise NotImplementedError


def test_batch_sizes_are_the_growth_of_all_replicas() -> None:
    rest = Workers(
        {"trunk#0": (60, 60, 60)},
        {"trunk#0": (100, 100, 100)},
        {"trunk#0": (110, 120, 102)},
        {"trunk#0": (120, 140, 106), "trunk#1": (6, 8, 4)},
        {},
    )
    clock = iter(float(i) * EVERY_S for i in range(100))
    watch = BatchWatch(rest, lambda: next(clock))
    watch.look(False)  # requests before the run come in late
    watch.look(True)
    found = watch.finish({"trunk": 26})
    assert found == (BatchSizes("trunk", 10, 48, (10.0, 28 / 8)),)
    assert found[0].to_dict()["mean"] == 4.8


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"workers": [{"name": "trunk#0"}]},
        {"workers": [{"name": "x", "incarnation": 1, "stages": [{"block": "b", "kpi": {"n": 1}}]}]},
        {"workers": 5},
        [],
    ],
)
def test_an_answer_of_another_form_ends_the_watch_and_not_the_run(answer: Any) -> None:
    class Other(Workers):
        def get(self, path: str) -> Any:
            return answer

    watch = BatchWatch(Other())
    watch.look(True)
    assert watch.finish({"trunk": 1}) == ()


def test_without_rest_or_when_it_goes_nothing_is_told() -> None:
    assert BatchWatch(None).finish({"trunk": 1}) == ()
    gone = Workers({})
    watch = BatchWatch(gone)
    watch.look(True)
    assert watch.finish({"trunk": 1}) == ()
