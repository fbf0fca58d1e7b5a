"""What experiments of the thesis leave when their system dies early, or in another way.

That all but the last round is kept of each, test_thesis_registry.py has.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from thesis_doubles import LOST, Doubled, Life, run_until, save_blocks

from blockflow.bench.thesis import offline, offline_memory
from blockflow.bench.thesis.experiments import EXPERIMENTS
from blockflow.bench.thesis.outcome import broken_off
from blockflow.core.errors import BlockFlowError, make_error


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_blocks(tmp_path_factory.mktemp("blocks"))


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
