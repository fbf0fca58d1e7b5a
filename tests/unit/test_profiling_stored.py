"""``blockflow profile --show``: what it says of verdicts and choices that lie with a block."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_rig import save_echoes

from blockflow.bench.profiling.choice import _above
from blockflow.bench.profiling.stored import Shelf, problem, stored, stored_tables
from blockflow.cli.main import main
from blockflow.core.engines import Selection
from blockflow.core.model import TensorSpec
from blockflow.core.profile import StageProfile
from blockflow.repository.echo import save_echo
from blockflow.repository.machine import fingerprint
from blockflow.repository.profile_record import ProfileKey, ProfileRecord, chain_digest, ran_by
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository
from tests.unit.test_profile_table import point
from tests.unit.test_repository_variants import choice, form, refused, save_block

WHY = "differs by 0.5 on [8, 2], allowed is 0.0001"


def test_refused_engines_and_a_choice_that_does_not_count_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = BlockRepository(tmp_path)
    digest = save_block(repository, "b").digest
    other = choice().model_copy(update={"engine": "exported"})
    repository.save_choice(repository.info("b"), "another-machine", other)
    repository.save_choice(repository.info("b"), fingerprint(), choice())
    show = ["profile", "b", "--show", "-r", str(tmp_path)]

    def shown() -> str:
        assert main(show) == 2  # there is no profile
        return " ".join(capsys.readouterr().out.split())

    repository.save_variant("b", "onnx", form(), b"x", digest=digest)
    assert "auto is openvino fp32 here" in shown() and "may not run" not in shown()
    repository.save_variant("b", "onnx", refused(openvino=WHY), b"x", digest=digest)
    told = shown()
    assert f"openvino may not run variant onnx: it {WHY}" in told
    assert "auto is openvino" not in told and "blockflow profile b --choose" in told
    assert main([*show, "--json"]) == 2
    (block,) = json.loads(capsys.readouterr().out)["blocks"]
    assert block["refused_engines"] == {"onnx": {"openvino": WHY}}
    assert block["choice"]["engine"] == choice().engine


def test_only_a_profile_that_holds_is_shown_and_each_block_needs_one() -> None:
    profile = StageProfile("a", "ab" * 32, "echo", "fp32", "m1", (point(1, 2.0),))
    key = ProfileKey(("a",), "echo", "fp32")
    record = ProfileRecord(key, profile, (), {}, {}, {}, True, "2026-01-01T00:00:00+00:00")
    holds = Shelf("a", "m1", ((record, ()),), {}, ("echo", "fp32"))
    stale = replace(holds, records=((record, ("cpu: measured on X, now Y",)),))
    assert [len(list(stored_tables(shelf))) for shelf in (holds, stale)] == [2, 1]
    found = problem([holds, Shelf("b", "m1", (), {}, None)])
    assert found is not None and (found.code, found.where) == ("NO_PROFILE", "b")
    assert problem([holds]) is None


def test_a_chain_that_begins_with_a_block_tells_nothing_of_the_block() -> None:
    profile = StageProfile("a", "ab" * 32, "echo", "fp32", "m1", (point(1, 2.0),))
    records = {
        blocks: ProfileRecord(
            ProfileKey(blocks, "echo", "fp32"), profile, (), {}, {}, {}, True, "2026-01-01T00:00"
        )
        for blocks in (("a", "b"), ("a",))
    }
    chain, alone = records["a", "b"], records["a",]
    found = problem([Shelf("a@1", "m1", ((chain, ()),), {}, None)])
    assert found is not None and found.code == "NO_PROFILE"
    stale = (chain, ("artifact: the chain's",)), (alone, ("cpu: the block's",))
    found = problem([Shelf("a", "m1", stale, {}, None)])
    assert found is not None and found.code == "STALE_PROFILE"
    assert "the block's" in found.message and "--chain" not in found.hint
    assert problem([Shelf("a@1", "m1", ((chain, ("stale",)), (alone, ())), {}, None)]) is None


def _save(repository: BlockRepository, *names: str) -> None:
    """A profile that holds."""
    store = ProfileStore(repository.root)
    infos = [repository.info(name) for name in names]
    selections = [Selection("echo", "fp32", {}, None)] * len(infos)
    key = ProfileKey.of([i.name for i in infos], selections)
    digest = chain_digest(infos)
    profile = StageProfile(key.name, digest, "echo", "fp32", store.machine, (point(1, 2.0),))
    ran, when = ran_by(infos, selections), "2026-01-01T00:00:00+00:00"
    store.save(ProfileRecord(key, profile, (), ran, store.facts, {}, True, when))


def test_what_was_asked_for_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository = save_echoes(tmp_path / "blocks", "a", "b", "c")
    topology = tmp_path / "topology.json"
    tasks = {"short": ["a", "b"], "long": ["a", "b", "c"], "one": ["b"]}
    topology.write_text(json.dumps({"blocks": ["a", "b", "c"], "tasks": tasks}))
    _save(repository, "a", "b")
    _save(repository, "a")

    def shown(*words: str) -> tuple[int, list[dict[str, Any]], str]:
        show = ["profile", "--show", "--json", "-r", str(repository.root)]
        status = main([*show, "--topology", str(topology), *words])
        told = capsys.readouterr()
        return status, json.loads(told.out)["blocks"], told.out + told.err

    for words in (["--chain", "a,b"], ["--task", "short"]):
        status, (chain,), _ = shown(*words)
        assert status == 0 and chain["block"] == "a+b", words
        (profile,) = chain["profiles"]
        assert profile["blocks"] == ["a", "b"] and profile["fresh"]
    for words in (["--chain", "a,b,c"], ["--task", "long"]):
        status, (chain,), told = shown(*words)
        assert status == 2 and not chain["profiles"] and "NO_PROFILE" in told
        assert "blockflow profile --chain a,b,c" in told
    assert [b["block"] for b in shown("--task", "one")[1]] == ["b"]
    assert [b["block"] for b in shown()[1]] == ["a", "b", "c"]
    assert main(["profile", "a", "--chain", "a,b", "--show", "-r", str(repository.root)]) == 2


def test_a_version_is_shown_by_its_own_profiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = BlockRepository(tmp_path)
    spec = TensorSpec("float32", ("rows", 4))
    for n in (1, 2):
        save_echo(repository, "b", spec, settings={"delay_ms": n}, version=str(n))
    for reference in ("b@1", "b@2"):
        assert problem([stored(repository, reference)]) is not None
        _save(repository, reference)
    (tmp_path / "b" / "manifest@0.json").write_text("{")  # one that cannot be read
    for reference, count in (("b@1", 1), ("b@2", 1), ("b", 2)):
        shelf = stored(repository, reference)
        held = [r.profile.digest for r, reasons in shelf.records if not reasons]
        assert held == [repository.info(reference).digest] and len(shelf.records) == count
        assert problem([shelf]) is None
        assert main(["profile", reference, "--show", "-r", str(tmp_path)]) == 0
        told = capsys.readouterr().out
        assert "holds" in told and ("stale" in told) is (count == 2)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0104, "0.0104"), (0.25, "0.25"), (0.010000003, "0.010000003")]
)
def test_what_is_above_a_bound_reads_so(value: float, text: str) -> None:
    assert _above(value, 0.01) == text
