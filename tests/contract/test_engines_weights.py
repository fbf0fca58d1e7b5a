"""Weights in memory that others map, too: all engines compute the same, some of them there."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch
from torch.fx import symbolic_trace

from blockflow.engine import sharing
from blockflow.engine.base import EngineOptions
from blockflow.engine.exported import ExportedEngine
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.tensormq.weights import FOLDER, WeightFiles, remove_unused
from tests.engine_rig import CASES, SPEC, Stored, convolution, model

SHARING = ("pt2",)
"""Those whose weights can lie anywhere; the others' frameworks keep them in forms of their own."""


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LEAST_BYTES", 1)


@pytest.fixture(params=[c for c in CASES if c != "compiled"])
def stored(shelf: BlockRepository, request: pytest.FixtureRequest) -> Stored:
    if request.param == "echo":
        return Stored(CASES["echo"], shelf, save_echo(shelf, "block-echo-weights", SPEC))
    return convolution(shelf, CASES[request.param])


def files(run_dir: Path) -> list[str]:
    folder = run_dir / FOLDER
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def test_the_results_are_the_same_to_the_bit(stored: Stored, tmp_path: Path) -> None:
    x, plain = torch.randn(4, 3, 8, 8), stored.load(stored.create())
    wanted = plain.run(x).clone()
    shared = [
        stored.load(stored.create(EngineOptions(weights=WeightFiles(tmp_path)))) for _ in range(2)
    ]
    sharing_one = stored.case is CASES["pt2"]
    assert len(files(tmp_path)) == sharing_one
    for engine in shared:
        engine.warm_up()
        assert torch.equal(engine.run(x), wanted)
        out = torch.empty_like(wanted)
        assert torch.equal(engine.run(x, out), wanted)
    remove_unused(tmp_path)
    assert len(files(tmp_path)) == sharing_one  # they are in use
    shared[0].close()
    assert torch.equal(shared[1].run(x), wanted)
    shared[1].close()
    gc.collect()  # a graph refers to itself
    remove_unused(tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", SHARING)
def test_each_way_to_compute_has_weights_of_its_own(
    shelf: BlockRepository, name: str, tmp_path: Path
) -> None:
    stored, x = convolution(shelf, CASES[name]), torch.randn(2, 3, 8, 8)
    kept = []
    ways = itertools.product(("fp32", "bf16"), ("contiguous", "channels_last"))
    for number, (precision, layout) in enumerate(ways):
        how = {"precision": precision, "extra": {"memory_format": layout}}
        wanted = stored.load(stored.create(EngineOptions(**how))).run(x)
        for _ in range(2):
            options = EngineOptions(**how, weights=WeightFiles(tmp_path))
            engine = stored.load(stored.create(options))
            assert torch.equal(engine.run(x), wanted)
            kept.append(engine)
        assert len(files(tmp_path)) == number + 1
    assert len(kept) == 8


@pytest.mark.parametrize("name", SHARING)
def test_each_block_has_weights_of_its_own(
    shelf: BlockRepository, name: str, tmp_path: Path
) -> None:
    """Also where they are of the same sizes."""

    def other() -> LoadedModel:
        module = model()
        module.conv.weight += 1
        return LoadedModel(module, "test", SPEC)

    x, kept = torch.randn(2, 3, 8, 8), []
    case = CASES[name]
    for number, stored in enumerate(
        (convolution(shelf, case), case.stored(shelf, "another", other))
    ):
        engine = stored.load(stored.create(EngineOptions(weights=WeightFiles(tmp_path))))
        assert torch.equal(engine.run(x), stored.load(stored.create()).run(x))
        kept.append(engine)
        assert len(files(tmp_path)) == number + 1


@pytest.mark.parametrize("name", SHARING)
def test_own_weights_where_they_are_asked_for(
    shelf: BlockRepository, name: str, tmp_path: Path
) -> None:
    stored = convolution(shelf, CASES[name])
    for where in ("own", "shared"):
        options = EngineOptions(extra={"weights": where}, weights=WeightFiles(tmp_path))
        engine = stored.load(stored.create(options))
        assert len(files(tmp_path)) == (where == "shared")
        engine.close()


@pytest.mark.parametrize("name", SHARING)
def test_what_lies_on_a_device_is_not_shared(
    shelf: BlockRepository, name: str, tmp_path: Path
) -> None:
    stored = convolution(shelf, CASES[name])
    where = EngineOptions(device="cuda:0", weights=WeightFiles(tmp_path))
    engine = ExportedEngine(stored.info, where)
    engine._share(symbolic_trace(model()))
    assert files(tmp_path) == []


@pytest.mark.parametrize("name", SHARING)
def test_damaged_weights_are_not_computed_with(
    shelf: BlockRepository, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever has happened to the file: what comes out is what the artifact says."""
    stored, x = convolution(shelf, CASES[name]), torch.randn(2, 3, 8, 8)
    options = EngineOptions(weights=WeightFiles(tmp_path))
    first = stored.load(stored.create(options))
    wanted = stored.load(stored.create()).run(x)
    (path,) = (tmp_path / FOLDER).iterdir()
    path.chmod(0o600)
    with path.open("r+b") as f:
        f.write(b"\xff" * 8)
    second = stored.load(stored.create(options))
    assert torch.equal(second.run(x), wanted)
    assert "differ" in caplog.text
    first.close()
