"""docs/performance.md is what its template and the stored results say; pictures are drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mlperf_documents import document as mlperf_document
from mlperf_documents import result as mlperf_result
from mlperf_documents import searched

from blockflow.bench import (
    gpu_figures,
    hop_figures,
    overload_figures,
    pipeline_figures,
    thesis_page,
)
from blockflow.bench.batching import figures as batching
from blockflow.bench.calibration import Steadiness, calibration_figures
from blockflow.bench.chaos.report import TIMELINE
from blockflow.bench.doc_tables import TABLES, faultsim_grid, fuzz_grid, plain_grid
from blockflow.bench.docs import Stored, made_pages, main, promises, read_all, render, take
from blockflow.bench.echo_chain import CONDITIONS, HANDLES
from blockflow.bench.mlperf.figures import figures_of
from blockflow.bench.plots import PLOTS, draw_all
from blockflow.bench.plots import main as plot
from blockflow.bench.reliability.page import PAGE as PROMISE_PAGE
from blockflow.bench.reliability.page import PROMISE_PASSAGE
from blockflow.bench.results import Figure, ResultFile, Run, latency_figure

DOCS = Path(__file__).resolve().parents[2] / "docs"
MOST_PICTURE_BYTES = 150 * 1024
NONE: frozenset[str] = frozenset()
PAGE, TEMPLATE = "performance.md", "performance.in.md"


def test_pages_are_made_of_their_templates_and_the_stored_results() -> None:
    made = made_pages(DOCS, *read_all(DOCS))
    assert {page.name for page in made} == {PAGE, "thesis-figures.md"}
    for page, text in made.items():
        assert text == page.read_text(encoding="utf-8"), "run: make bench-docs"


def test_the_promises_are_what_the_stored_results_say() -> None:
    page = (DOCS / PROMISE_PAGE).read_text(encoding="utf-8")
    stored, _, _ = read_all(DOCS)
    assert page == PROMISE_PASSAGE.fill(page, promises(stored)), "run: make bench-docs"


def test_the_template_shows_every_table_and_picture() -> None:
    template = (DOCS / TEMPLATE).read_text(encoding="utf-8")
    for name in TABLES:
        assert f"<!-- results: {name} -->" in template
    for name in PLOTS:
        assert f"<!-- image: {name} |" in template


def test_stored_pictures_are_small() -> None:
    for path in (DOCS / "img").glob("*.png"):
        assert path.name in PLOTS, f"{path}: nothing draws it"
        assert path.stat().st_size < MOST_PICTURE_BYTES, path


def hop_results() -> list[Figure]:
    out = []
    for size in (0, 1024, 2**20):
        for condition in CONDITIONS:
            mode = HANDLES.name if size else hop_figures.BARE
            labels = {"bytes": size, "condition": condition}
            out.append(latency_figure(hop_figures.HOP, mode, None, [0.1, 0.2, 0.3], labels))
    return out


def pipeline_results() -> list[Figure]:
    labels = {"engine": "exported", "precision": "fp32", "model": "digits"}
    ways = (pipeline_figures.TENSORMQ, pipeline_figures.ONE_WORKER)
    out = [
        Figure(
            pipeline_figures.RATIO, w, 1, None, None, 1.02, "x", 9, low=1.0, high=1.1, labels=labels
        )
        for w in ways
    ]
    return out + [
        Figure(pipeline_figures.THROUGHPUT, w, 1, None, None, 20.0, "1/s", 4, labels=labels)
        for w in (pipeline_figures.BOUND, *ways)
    ]


def gpu_results() -> list[Figure]:
    samples = gpu_figures.Samples(blocks=4)
    costs = {gpu_figures.IN_PROCESS: 0.0, gpu_figures.SUM: 0.1}
    costs |= {gpu_figures.TENSORMQ: 0.4, gpu_figures.ZEROMQ: 8.0}
    for batch in (1, 32):
        for way, more_ms in costs.items():
            for n in range(6):
                sample = gpu_figures.Sample(3.0 * batch + more_ms + 0.001 * n)
                samples.add(way, batch, sample)
    samples.copies = dict.fromkeys(gpu_figures.WAYS, (1.0, 1.0))
    out = gpu_figures.latency_figures(samples)
    for way, clients in ((w, n) for w in gpu_figures.WAYS for n in (1, 2, 10)):
        out += gpu_figures.client_figures(way, clients, [3.0, 3.5, 4.0 * clients], 300.0)
    load = gpu_figures.Load([290.0] * 5, [300.0] * 5, 0.25, 700.0)
    return out + gpu_figures.load_figures(dict.fromkeys(gpu_figures.WAYS, load))


def batching_results() -> list[Figure]:
    labels = {"experiment": "load", "load": "low", "rate": 9.0, "x_serial": 0.5}
    time = latency_figure(batching.TIME, "ZeroBatch", None, [1.0, 2.0], labels)
    peak = Figure(
        batching.PEAK, "ZeroBatch", None, None, None, 9.0, "1/s", 1, labels={"experiment": "load"}
    )
    return [time, peak]


def overload_results() -> list[Figure]:
    labels = {"offered": 50.0, "rejected": 1.0, "late": 0.0, "failed": 0.0, "started_s": 0.0}
    goodput = Figure(
        overload_figures.GOODPUT, "1x", 1, None, None, 48.0, "1/s", 9, labels={**labels, "limit": 4}
    )
    memory = Figure(
        overload_figures.MEMORY, "all", None, None, None, 90.0, "MiB", 1, labels={"at_s": 0.5}
    )
    return [goodput, memory]


def chaos_results() -> list[Figure]:
    labels = {"at_s": 0.0, "failed": 0.0, "rss": 90.0, "shared": 1.0}
    return [
        Figure("requests", "all", None, None, None, 40.0, "requests", 40),
        Figure(TIMELINE, "all", None, None, None, 20.0, "1/s", 20, labels=labels),
        Figure(TIMELINE, "all", None, None, None, 20.0, "1/s", 20, labels={**labels, "at_s": 1.0}),
    ]


STEADY = calibration_figures(Steadiness(1.0, 1.01, 0.02))


def store_gpu(folder: Path) -> None:
    machine = {"gpu": "a GPU", "gpu_gib": 80.0, "cpu": "a cpu"}
    ResultFile(folder / "gpu.jsonl", "gpu").write([*gpu_results(), *STEADY], machine)


def store(folder: Path) -> None:
    ResultFile(folder / "hops.jsonl", "hops", "make bench-hops").write([*hop_results(), *STEADY])
    ResultFile(folder / "pipeline.jsonl", "pipeline").write(pipeline_results())
    store_gpu(folder)
    ResultFile(folder / "batching.jsonl", "batching").write(batching_results())
    ResultFile(folder / "overload.jsonl", "overload").write(overload_results())
    runs = [mlperf_result("single-stream"), mlperf_result("server", **searched())]
    loadgen = figures_of(mlperf_document(results=runs))
    ResultFile(folder / "mlperf.jsonl", "mlperf").write(loadgen)
    for name in ("chaos", "kills", "soak"):
        ResultFile(folder / f"{name}.jsonl", name).write(chaos_results())


def store_experiment(folder: Path, name: str, of: str, **more: object) -> None:
    """As ``blockflow bench thesis`` leaves one."""
    document = {
        "name": name,
        "of": [of],
        "title": f"What {name} costs",
        "state": "done",
        "says": f"{name} costs little",
        "notes": ["a note"],
        "fixed_work": "",
        "settings": {"quick": False},
        "command": "blockflow bench thesis",
        "date": "2026-01-01",
        "machine": {"cpu": "a cpu", "cores": 2, "torch": "2"},
        "tables": [{"title": "Costs", "heads": ["way", "ms"], "rows": [["handle", "1.0"]]}],
        "pictures": [{"title": "a picture", "file": f"{name}.png"}],
        **more,
    }
    (folder / "thesis").mkdir(parents=True, exist_ok=True)
    (folder / "thesis" / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "thesis" / f"{name}.png").write_bytes(b"png")


def test_results_are_taken_drawn_and_shown(tmp_path: Path) -> None:
    store(tmp_path / "results")
    docs = tmp_path / "docs"
    docs.mkdir()
    text = "# Title\n\n<!-- results: hops.time -->\n\n<!-- image: hops.png | a hop -->\n\nEnd.\n"
    (docs / TEMPLATE).write_text(text, encoding="utf-8")
    marks = f"before\n{PROMISE_PASSAGE.begin}\n{PROMISE_PASSAGE.end}\nafter\n"
    (docs / PROMISE_PAGE).write_text(marks, encoding="utf-8")
    assert main(["--docs", str(docs), "--take", str(tmp_path / "results")]) == 0
    page = (docs / PAGE).read_text(encoding="utf-8")
    assert "| 1 KiB | handle, ipc | 0.200 |" in page
    assert "![a hop](img/hops.png)" in page
    assert "`make bench-hops`, 20" in page
    assert "Fixed work: spread 2.0%" in page
    assert page.endswith("End.\n")
    promised = (docs / PROMISE_PAGE).read_text(encoding="utf-8")
    assert promised.startswith("before\n") and promised.endswith("after\n")
    assert "| 1,000 kills over all roles under load | one terminal reply each |" in promised
    sizes = {p.name: p.stat().st_size for p in (docs / "img").iterdir()}
    assert set(sizes) == set(PLOTS)
    assert max(sizes.values()) < MOST_PICTURE_BYTES
    # the same results give the same picture
    same = {(docs / "img" / f"{name}.png").read_bytes() for name in ("chaos", "kills", "soak")}
    assert len(same) == 1


def test_a_table_without_rows_is_left_out() -> None:
    page = render(
        "a\n\n<!-- results: pipeline.missing -->\n\nb", {"pipeline": Stored([Run([], {})])}, NONE
    )
    assert page.endswith("a\n\nb\n")


def test_a_table_names_the_runs_that_it_shows() -> None:
    runs = [
        Run(overload_results()[:1], {"cpu": "a cpu"}, "2026-01-01", "make goodput"),
        Run(overload_results()[1:], {"cpu": "a cpu"}, "2026-01-02", "make memory"),
    ]
    page = render("<!-- results: overload.loads -->", {"overload": Stored(runs)}, NONE)
    assert "<sub>`make goodput`, 2026-01-01; a cpu" in page
    assert "make memory" not in page
    assert "make memory" in Stored(runs).provenance("")


def test_several_runs_are_listed_once_and_named_by_their_numbers() -> None:
    text = "<!-- results: overload.loads -->\n\n<!-- runs: overload -->"
    runs = [
        Run(overload_results()[:1], {"cpu": "a cpu"}, "2026-01-01", "make goodput"),
        Run(overload_results()[1:], {"cpu": "a cpu"}, "2026-01-02", "make memory"),
    ]
    page = render(text, {"overload": Stored(runs)}, NONE)
    assert "<sub>Run 1 of the list at the end of this section.</sub>\n\n*Runs:*\n\n1. " in page
    assert page.count("`make goodput`, 2026-01-01") == page.count("\n2. `make memory`, 2026") == 1
    alone = render(text, {"overload": Stored(runs[:1])}, NONE)
    assert "<sub>`make goodput`, 2026" in alone and "Runs" not in alone
    assert "Runs" not in render(text, {}, NONE)
    with pytest.raises(ValueError, match="nonsense"):
        render("<!-- runs: nonsense -->", {}, NONE)


def test_verdicts_are_counted_by_benchmark() -> None:
    text = "| | met | noise | missed |\n<!-- verdicts: batching.aims | [there](#there) -->"
    labels = {"base": "serial", "goal": 1.0}
    rows = [
        Figure(
            batching.CLOSED_RATIO,
            "x",
            None,
            None,
            None,
            1.0,
            "x",
            1,
            labels={**labels, "verdict": verdict},
        )
        for verdict in ("met", "missed", "met", "within noise", "missed", "missed")
    ]
    page = render(text, {"batching": Stored([Run(rows, {})])}, NONE)
    assert page.splitlines()[-1] == "| [there](#there) | 2 | 1 | 3 |"
    assert render(text, {}, NONE).splitlines()[-1] == "| [there](#there) |  |  |  |"


def test_without_results_the_page_says_what_makes_them() -> None:
    text = "before\n\n<!-- results: hops.time -->\n\n<!-- image: hops.png | a hop -->\n\nafter"
    page = render(text, {}, NONE)
    assert "*No stored results yet: `make bench-hops`.*\n\nafter\n" in page
    assert "img/" not in page


@pytest.mark.parametrize("line", ["<!-- results: nonsense -->", "<!-- image: nonsense.png | x -->"])
def test_a_misspelt_placeholder_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        render(line, {}, NONE)


def test_a_section_is_there_when_its_results_are() -> None:
    text = "a\n<!-- if: overload -->\n\nb\n\n<!-- results: overload.loads -->\n\n<!-- end -->\nc"
    assert render(text, {}, NONE) == "a\nc\n"
    page = render(text, {"overload": Stored([Run(overload_results(), {})])}, NONE)
    assert "\nb\n\n| load |" in page
    assert "| 1x | 50.0 | 48.0 | 100% |" in page
    with pytest.raises(ValueError, match="nonsense"):
        render("<!-- if: nonsense -->\n<!-- end -->", {}, NONE)
    with pytest.raises(ValueError, match="no end"):
        render("<!-- if: overload -->\nb", {}, NONE)


GPU_SECTION = re.compile(r"^## On a GPU: .*?(?=^## )", re.MULTILINE | re.DOTALL)


def test_without_stored_results_of_a_gpu_the_page_says_that_there_was_none(tmp_path: Path) -> None:
    (section,) = GPU_SECTION.findall((DOCS / TEMPLATE).read_text(encoding="utf-8"))
    without = render(section, {}, NONE)
    assert "Not run yet: no machine with a GPU was at hand." in without
    assert "|" not in without and "in-process" not in without
    # and with them
    store_gpu(tmp_path / "results")
    docs = tmp_path / "docs"
    take(tmp_path / "results", docs)
    page = render(section, *read_all(docs))
    assert "Not run" not in page and "No stored results" not in page
    assert "| 1 | tensormq | 3.40 | 3.40 | 0.100 (0.100-0.100) |" in page
    assert "| 10 | 3.50 | 300 | 3.50 | 300 |" in page
    assert "| bound | 300 |" in page
    assert "| tensormq | 290 | 0.967 (0.967-0.967) | 0.250 | 700 | 1.00 | 1.00 |" in page
    assert "| overhead per hop | <= 0.15 ms | 0.100 ms | met |" in page
    assert "](img/gpu.png)" in page
    assert "`make bench-gpu`, 20" in page and "; a GPU (80.0 GiB), a cpu, " in page


def test_the_thesiss_experiments_are_stored_and_shown_in_its_order(tmp_path: Path) -> None:
    store_experiment(tmp_path, "late", "table 4.10")
    store_experiment(tmp_path, "early", "table 4.9")
    store_experiment(tmp_path, "sound", "table 4.1", settings={"quick": True})
    (tmp_path / "thesis" / "other.json").write_text("{}", encoding="utf-8")
    docs = tmp_path / "docs"
    (docs / "img").mkdir(parents=True)
    take(tmp_path, docs)
    text = "<!-- if: thesis -->\n# T\n\n<!-- thesis -->\n<!-- end -->"
    page = render(text, *read_all(docs))
    assert page.index("\n## What early costs (table 4.9)") < page.index("\n## What late costs")
    assert "| `early` | table 4.9 | done | early costs little |" in page
    assert "| way | ms |\n| --- | --: |\n| handle | 1.0 |" in page
    assert "sound" not in page
    assert "![a picture](img/thesis/early.png)" in page
    assert "<sub>`blockflow bench thesis`, 2026-01-01; a cpu, 2 cores, torch 2.</sub>" in page
    assert thesis_page.read(tmp_path / "none") == []
    assert "# T" not in render(text, {}, NONE)


def test_no_old_picture_stays_beside_new_figures(tmp_path: Path) -> None:
    store_experiment(tmp_path, "large", "table 4.1")
    store_experiment(tmp_path, "small", "table 4.2")
    docs = tmp_path / "docs"
    take(tmp_path, docs)
    (docs / "img" / "thesis" / "of-long-ago.png").write_bytes(b"png")
    (tmp_path / "thesis" / "large.png").write_bytes(bytes(1024 * 1024))  # not taken
    take(tmp_path, docs)
    assert [p.name for p in (docs / "img" / "thesis").iterdir()] == ["small.png"]


def test_one_line_says_what_fuzzers_and_simulator_found() -> None:
    def figure(name: str, mode: str, value: float, n: int = 1) -> Figure:
        return Figure(name, mode, None, None, None, value, "1", n)

    fuzzed = [
        figure("malformed frames", "all decoders", 1e6),
        figure("malformed frames", "all", 999_980),
        figure("failures", "all", 0),
        figure("growth of memory", "up", 5.04),
        figure("growth of memory", "a#0", 1.0),
    ]
    assert fuzz_grid(fuzzed).rows == [("1,000,000", "999,980", "0", "+5.0 (up)")]
    names = ("virtual time", "requests", "faults", "real time", "violations")
    simulated = [figure(name, "all", 24.0, 1000) for name in names]
    assert faultsim_grid(simulated).rows == [("1000", "24", "24", "24", "24", "24.0")]
    assert plain_grid([figure("a", "b", 2.0)]).rows == [("a", "b", "2.00", "1", "", "", "")]


def test_old_and_empty_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    assert Stored.read(path) is None
    path.write_text("", encoding="utf-8")
    assert Stored.read(path) is None
    line = {"benchmark": "old", "name": "latency", "mode": "a", "batch": 1, "p50_ms": 1.0}
    line |= {"p90_ms": 2.0, "value": 1.0, "unit": "ms", "n": 3, "machine": {"cpu": "x"}, "new": 1}
    path.write_text(json.dumps(line) + "\n", encoding="utf-8")
    found = Stored.read(path)
    assert found is not None
    assert found.figures[0].p90_ms == 2.0
    assert found.provenance("make x").startswith("`make x`; x, ")


def test_plots_are_drawn_from_what_is_there(tmp_path: Path) -> None:
    store_gpu(tmp_path)
    assert plot(["--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    (drawn,) = (tmp_path / "out").iterdir()
    assert drawn.name == "gpu.png"
    # the same by the other command's way
    (again,) = draw_all(tmp_path, tmp_path / "again")
    assert again.read_bytes() == drawn.read_bytes()
    assert [p.name for p in draw_all(tmp_path / "none", tmp_path)] == []


def test_plots_of_what_are_no_figures_or_cannot_be_written_end_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot(["--results", str(tmp_path)]) == 1
    assert "(quick runs are not drawn)" in " ".join(capsys.readouterr().out.split())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "hops.jsonl").write_text('{"name": 1\n', encoding="utf-8")
    assert plot(["--results", str(broken)]) == 2
    told = capsys.readouterr().err
    assert "INVALID_REQUEST: this is no file of figures" in told
    assert "hops.jsonl" in told
    store_gpu(tmp_path)
    assert plot(["--results", str(tmp_path), "--out", str(broken / "hops.jsonl")]) == 2
    assert "hops.jsonl" in capsys.readouterr().err
