"""What holds for every experiment of the thesis: whose figures stand beside, what it draws, and
what it leaves when its system dies, or Ctrl-C comes, in mid-run.

Each runs over doubles of everything that computes or talks, with as many rounds as in a full run. A
new experiment is tested by being in the registry; what it draws is added to ``DRAWN``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from thesis_doubles import LOST, Doubled, Life, run_until, save_blocks

from blockflow.bench import thesis_page
from blockflow.bench.compare.judgement import MIN_PAIRS
from blockflow.bench.results import PARTIAL, ResultFile
from blockflow.bench.thesis import deployment, devices
from blockflow.bench.thesis.beside import THESIS_MODEL
from blockflow.bench.thesis.devices_figures import OVERHEAD
from blockflow.bench.thesis.experiment import Experiment, Findings, Settings
from blockflow.bench.thesis.experiments import EXPERIMENTS
from blockflow.bench.thesis.memory_measure import ROUNDS
from blockflow.bench.thesis.memory_tables import TABLES
from blockflow.bench.thesis.outcome import (
    Call,
    Outcome,
    State,
    broken_off,
    make_document,
    read_documents,
    write_outcome,
)
from blockflow.bench.thesis.report import sections, write_report
from blockflow.bench.thesis.served import ARMS
from blockflow.core.errors import BlockFlowError

OTHER = "resnet18"

DRAWN: Mapping[str, set[str]] = {
    "offline": {"share", "parameters"},
    "transports": {"round-trips"},
    "pipeline": {"time"},
    "components": {"blocks", "pipeline", "inference", "overhead"},
    "utilisation": {"cpu"},
    "batches": {"time", "overhead"},
    "copies": {"moved", "cumulative"},
    "energy": {"batches"},
    "clients": {"clients"},
    "throughput": {"rates"},
    "memory-by-rate": {"rates"},
    "memory-by-block": {"blocks"},
    "devices": {"blocks"},
    "deployment": {"savings-resnet50", "savings-resnet152"},
}
"""Experiment -> stems of its plots."""

PRINTS_NOTHING = {"memory-by-rate"}
"""Of these the thesis has a picture without numbers, and tells none."""

SAYS_NOTHING = {"offline", "utilisation", "batches", "memory-by-rate", "deployment"}
"""Whose line is about this machine alone, or on a GPU only beside the thesis."""

each = pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_blocks(tmp_path_factory.mktemp("blocks"))


@pytest.fixture(scope="module")
def lives() -> dict[str, Life]:
    """How much of its system each experiment has asked for, with the thesis's own model."""
    return {}


@pytest.fixture(scope="module")
def found(repository: Path, lives: dict[str, Life]) -> Any:
    """What an experiment finds with a model, run once; with another than the thesis's, quickly."""

    @cache
    def run(experiment: Experiment, model: str) -> Findings:
        life = Life()
        with pytest.MonkeyPatch.context() as patch:
            quick = model != THESIS_MODEL and experiment is not deployment.EXPERIMENT
            context = Doubled(repository, Settings(model=model, quick=quick))
            made: Findings = run_until(experiment, context, life, patch)
        if model == THESIS_MODEL:
            lives[experiment.name] = life
        return made

    return run


def legends(found: Findings) -> list[str]:
    """What stands in the pictures' legends, those of a page among them."""
    return [
        text.get_text()
        for plot in found.plots
        for owner in (plot.page, *plot.page.axes)
        for legend in (owner.legends if owner is plot.page else [owner.get_legend()])
        if legend is not None
        for text in legend.get_texts()
    ]


@each
def test_the_thesiss_figures_stand_beside_its_own_model_only(
    experiment: Experiment, found: Any
) -> None:
    ours, other = found(experiment, THESIS_MODEL), found(experiment, OTHER)
    if experiment.name not in PRINTS_NOTHING:
        assert any("thesis" in f.labels for f in ours.figures)
    assert ("thesis: " in ours.says) == (experiment.name not in SAYS_NOTHING)
    # What names no model is of none: a string that goes there and back.
    beside = [f for f in other.figures if "thesis" in f.labels]
    assert not [f for f in beside if "model" in f.labels]
    assert not beside or experiment.name == "transports"
    said = other.says.partition("a tensor of")[2] if beside else other.says
    assert not re.search(r"thesis(\'s)?:? (about )?\d|the thesis\'s grew", said)
    assert not [note for note in other.notes if re.search(r"thesis: \d", note)]
    if not beside:
        assert not [text for text in legends(other) if "thesis" in text]
        for grid in other.tables:
            if not grid.title.startswith("Table 4.4"):  # shares of classes, of any model
                at = [i for i, head in enumerate(grid.heads) if "thesis" in head]
                assert not [row for row in grid.rows if row and any(row[i] for i in at)]
                assert not any("[" in cell for row in grid.rows for cell in row)


@each
def test_every_experiment_draws_what_it_says(
    experiment: Experiment, found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = found(experiment, THESIS_MODEL)
    assert {p.stem for p in made.plots} == DRAWN[experiment.name]
    for plot in made.plots:
        assert plot.title
        assert plot.page.axes
        for ax in plot.page.axes:
            assert ax.has_data(), f"{plot.stem}: nothing is drawn"
            assert ax.get_xlabel() or [t.get_text() for t in ax.get_xticklabels()]

    def touch(_page: object, path: Path) -> None:
        path.touch()

    monkeypatch.setattr("blockflow.bench.thesis.outcome.save_page", touch)
    document = write_outcome(Outcome(experiment, made), Call(Settings(), "a command", {}), tmp_path)
    names = {f"{experiment.name}-{stem}.png" for stem in DRAWN[experiment.name]}
    assert {p.name for p in tmp_path.glob("*.png")} == names
    assert {p["file"] for p in document["pictures"]} == names


@each
def test_all_but_the_last_round_is_kept_and_marked_when_the_system_dies(
    experiment: Experiment,
    found: Any,
    lives: dict[str, Life],
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It dies just before the end, where all but the last round is known."""
    whole = found(experiment, THESIS_MODEL)
    assert whole.skipped is None
    assert whole.figures and whole.tables and whole.plots
    assert "too few rounds" not in whole.says  # a full run has enough of them
    spent = lives[experiment.name].spent
    assert spent, "nothing of it can die here: this test lacks doubles for it"

    context = Doubled(repository)
    assert context.settings == Settings(model=THESIS_MODEL)
    with pytest.raises(BlockFlowError) as caught:
        run_until(experiment, context, Life(spent - 1), monkeypatch)
    assert caught.value.code == LOST
    assert {f.name for f in context.kept} <= {f.name for f in whole.figures}
    assert max((f.n for f in context.kept), default=0) >= MIN_PAIRS - 1, "not all rounds are kept"

    outcome = broken_off(experiment, caught.value, context.kept, 1.0)
    assert outcome.state is State.FAILED
    assert all(f.labels[PARTIAL] for f in outcome.findings.figures)
    document = make_document(outcome, Call(Settings(), "a command", {}), files=["kept.csv"])
    assert document["partial"]
    assert "PARTIAL" in document["tables"][0]["title"]
    assert len(document["tables"][0]["rows"]) == len(context.kept)
    assert any("PARTIAL" in getattr(part, "text", "") for part in sections([document]))


def test_other_results_have_other_names() -> None:
    by = {e.name: e for e in EXPERIMENTS}
    usual = Settings()
    assert [e.stem(usual) for e in EXPERIMENTS] == [e.name for e in EXPERIMENTS]
    others = [
        Settings(model="resnet152"),
        Settings(engine="openvino-bf16"),
        Settings(device="cuda:1"),
        Settings(model="alexnet", engine="onnxruntime"),
    ]
    assert [by["pipeline"].stem(s) for s in others] == [
        "pipeline-resnet152",
        "pipeline-openvino-bf16",
        "pipeline-cuda",
        "pipeline-alexnet-onnxruntime",
    ]
    # Only what is calculated from them has other constants; that is of no call's model.
    constants = Settings(model="resnet152", constants="thesis")
    assert by["deployment"].stem(constants) == "deployment-constants"
    assert by["pipeline"].stem(constants) == "pipeline-resnet152"
    assert by["deployment"].stem(Settings(device="cuda:0")) == "deployment"  # measured on the CPU


def test_constants_and_another_model_leave_what_was_measured(
    found: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockflow.bench.thesis.outcome.save_page", lambda _p, path: path.touch())
    results = tmp_path / "thesis"
    measured = found(deployment.EXPERIMENT, THESIS_MODEL)
    calls = {
        "deployment": (Settings(), measured),
        "deployment-constants": (Settings(constants="thesis"), Findings("calculated")),
        "deployment-resnet152": (Settings(model="resnet152"), Findings("another model")),
    }
    for settings, findings in calls.values():
        call = Call(settings, "a command", {"commit": "0123456789ab", "dirty": False})
        write_outcome(Outcome(deployment.EXPERIMENT, findings), call, results)
    assert {p.stem for p in results.glob("*.json")} == set(calls)
    # What was measured first is whole, with both of the thesis's tables.
    judged = ResultFile(results / "deployment.jsonl", "").read()
    assert {f["labels"].get("table") for f in judged} >= {"4.5", "4.6"}
    documents = read_documents(results, ["deployment"])
    assert [d["variant"] for d in documents] == ["", "constants", "resnet152"]
    # A second call of one of them takes that one's place alone.
    settings, _ = calls["deployment-constants"]
    again = Outcome(deployment.EXPERIMENT, Findings("calculated again"))
    write_outcome(again, Call(settings, "a command", {}), results)
    assert [d["says"] for d in read_documents(results, ["deployment"])] == [
        measured.says,
        "calculated again",
        "another model",
    ]
    write_report(results, ["deployment"])
    report = (results / "report.md").read_text(encoding="utf-8")
    docs = tmp_path / "docs"
    docs.mkdir()
    thesis_page.take(tmp_path, docs)
    page = "\n".join(thesis_page.lines(thesis_page.read(docs / "results"), frozenset()))
    for text in (report, page):
        for said in (measured.says, "calculated again", "another model"):
            assert said in text
        title = deployment.EXPERIMENT.title
        for variant in ("", " (constants)", " (resnet152)"):
            assert re.search(rf"^#+ {title}{re.escape(variant)} \(table 4.4", text, re.MULTILINE)
        assert "commit 0123456789ab" in text


def test_both_models_of_the_thesis_are_measured_in_one_call(found: Any) -> None:
    made = found(deployment.EXPERIMENT, THESIS_MODEL)
    tables = {f.labels["table"]: f for f in made.figures if "table" in f.labels}
    assert set(tables) == {"4.5", "4.6"}
    assert {f.labels["model"] for f in tables.values()} == set(TABLES)
    assert all("verdict" in f.labels and f.n == ROUNDS for f in tables.values())
    assert made.says.count("memory of 24 deployments") == 2


def test_on_every_number_of_devices_a_way_is_visited_twice(found: Any) -> None:
    made = found(devices.EXPERIMENT, THESIS_MODEL)
    modes = {
        pdi: {f.mode for f in made.figures if f.name == OVERHEAD and f.labels["pdi"] == pdi}
        for pdi in (25.0, 50.0)
    }
    assert modes == {pdi: set(ARMS) for pdi in modes}
