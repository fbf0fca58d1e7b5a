"""What every experiment of the thesis leaves when its system dies, or Ctrl-C comes, in mid-run.

Each runs here from begin to end with as many rounds as in a full run, over doubles of everything
that computes or talks: first whole, then with a death just before the end, where all but the last
round is known. A new experiment is tested by being in the registry.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from thesis_doubles import LOST, SETTINGS, Doubled, Life, run_until, save_blocks

from blockflow.bench.compare.judgement import MIN_PAIRS
from blockflow.bench.results import PARTIAL
from blockflow.bench.thesis import offline, offline_memory
from blockflow.bench.thesis.experiment import Experiment
from blockflow.bench.thesis.experiments import EXPERIMENTS
from blockflow.bench.thesis.outcome import Call, State, broken_off, make_document
from blockflow.bench.thesis.report import sections
from blockflow.core.errors import BlockFlowError, make_error


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_blocks(tmp_path_factory.mktemp("blocks"))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_all_but_the_last_round_is_kept_and_marked_when_the_system_dies(
    experiment: Experiment, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life()
    whole = run_until(experiment, Doubled(repository), life, monkeypatch)
    assert whole.skipped is None
    assert whole.figures and whole.tables and whole.plots
    assert "too few rounds" not in whole.says  # a full run has enough of them
    assert life.spent, "nothing of it can die here: this test lacks doubles for it"

    context = Doubled(repository)
    with pytest.raises(BlockFlowError) as caught:
        run_until(experiment, context, Life(life.spent - 1), monkeypatch)
    assert caught.value.code == LOST
    assert {f.name for f in context.kept} <= {f.name for f in whole.figures}
    assert max((f.n for f in context.kept), default=0) >= MIN_PAIRS - 1, "not all rounds are kept"

    outcome = broken_off(experiment, caught.value, context.kept, 1.0)
    assert outcome.state is State.FAILED
    assert all(f.labels[PARTIAL] for f in outcome.findings.figures)
    call = Call(SETTINGS, "blockflow bench thesis", {})
    document = make_document(outcome, call, files=["kept.csv"])
    assert document["partial"]
    assert "PARTIAL" in document["tables"][0]["title"]
    assert len(document["tables"][0]["rows"]) == len(context.kept)
    assert any("PARTIAL" in getattr(part, "text", "") for part in sections([document]))


def test_nothing_is_kept_of_what_died_at_once(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for experiment in EXPERIMENTS:
        context = Doubled(repository)
        with pytest.raises(BlockFlowError, match=LOST):
            run_until(experiment, context, Life(0), monkeypatch)
        assert context.kept == []
        outcome = broken_off(experiment, make_error(LOST, "it died"), context.kept, 1.0)
        assert outcome.findings.tables == []


def test_the_times_are_kept_when_the_memory_cannot_be_measured(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Doubled(repository)
    rounds, forms = 101, 4  # the warm-up and the form that is measured twice are among them
    with pytest.raises(BlockFlowError, match=LOST):
        run_until(offline.EXPERIMENT, context, Life(rounds * forms), monkeypatch)
    assert max(f.n for f in context.kept if f.name == offline.TIME) == rounds - 1
    assert offline_memory.OWN not in {f.name for f in context.kept}
