"""The command that makes a missing profile makes the very one that was missing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from control_rig import SPEC, echo_repository

from blockflow.batching.registry import policy_problems
from blockflow.bench.profiling import run
from blockflow.cli import profile as cli
from blockflow.control.policies import policy_misfits
from blockflow.control.profiles import ProfileShelf
from blockflow.core.cores import Cores
from blockflow.core.errors import Problem, RequestError
from blockflow.core.measuring import Subject, commands
from blockflow.core.model import ROWS
from blockflow.core.profile import Point, StageProfile
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import parse_topology
from blockflow.repository.echo import save_echo
from blockflow.repository.profile_record import ProfileKey, ProfileRecord, ran_by
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository

CORES = (0, 1, 2, 3)
LBCI = {"policy": "lbci", "t_opt_ms": 500}


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "available_cores", lambda: Cores(CORES))


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    return echo_repository(tmp_path / "blocks")


def misfits(repository: BlockRepository, *blocks: Mapping[str, Any]) -> list[Problem]:
    body = {"blocks": list(blocks), "tasks": {b["name"]: [b["name"]] for b in blocks}}
    topology = parse_topology(body, repository.info, policy_problems)
    return policy_misfits(topology, CORES, ProfileShelf(repository.root))


def obey(repository: BlockRepository, hint: str) -> list[str]:
    """Store what the commands of ``hint`` would measure, as the command line reads them."""
    app = typer.Typer()
    app.command()(cli.profile)
    ran = hint.removeprefix("run: ").split(" && ")
    for command in ran:
        name, what, *words = shlex.split(command)
        assert (name, what) == ("blockflow", "profile")
        told = typer.main.get_command(app).make_context("profile", words).params
        names = ("engines", "precisions", "option", "threads", "rows", "lengths", "confidence")
        more = ("seconds", "again", "choose", "tolerance")
        wish = cli._wish(*(told[n] for n in (*names, *more)))
        store = ProfileStore(repository.root)
        for subject in cli._subjects(repository, told["blocks"], "", "", Path()):
            infos = [repository.info(n) for n in subject]
            threads = {cell.threads for cell in run.axes(infos, wish)}
            points = tuple(Point(n, 1, None, 9, *[5.0] * 6, 0.0, 0) for n in threads)
            for candidate in run.contenders(infos, wish, store.machine):
                key = ProfileKey.of([i.name for i in infos], candidate.selections)
                digest = infos[0].digest
                head = (key.name, digest, key.engine, key.precision, store.machine)
                record = ProfileRecord(
                    key,
                    StageProfile(*head, points),
                    (),
                    ran_by(infos, candidate.selections),
                    store.facts,
                    {},
                    True,
                    "2026-01-01T00:00:00+00:00",
                )
                store.save(record)
    return ran


@pytest.mark.parametrize(
    ("block", "command"),
    [
        ({}, "blockflow profile a"),
        ({"engine": "echo"}, "blockflow profile a --engines echo"),
        ({"precision": "fp32"}, "blockflow profile a --precisions fp32"),
        (
            {"engine": "echo", "options": {"delay_ms": 2.5}},
            "blockflow profile a --engines echo --option delay_ms=2.5",
        ),
        ({"threads": 2}, "blockflow profile a"),
        ({"threads": 3}, "blockflow profile a --threads 3"),
        ({"version": "1"}, "blockflow profile a@1"),
    ],
    ids=str,
)
def test_what_the_hint_measures_satisfies_the_check(
    repository: BlockRepository, block: dict[str, Any], command: str
) -> None:
    if "version" in block:  # another one is the current
        save_echo(repository, "a", SPEC, settings={"add": 1}, version="2")
    spec = {"name": "a", "threads": 1, "batching": LBCI, **block}
    (problem,) = misfits(repository, spec)
    assert problem.hint == f"run: {command}"
    obey(repository, problem.hint)
    assert misfits(repository, spec) == []


def test_blocks_that_are_run_alike_share_a_command(repository: BlockRepository) -> None:
    more = {"worker": "w", "batching": LBCI, "threads": 1}
    blocks = [
        {"name": "a", **more},
        {"name": "b", "engine": "echo", "options": {"delay_ms": 1.5}, **more},
        {"name": "c", **more},
    ]
    (problem,) = misfits(repository, *blocks)
    assert obey(repository, problem.hint) == [
        "blockflow profile a c",
        "blockflow profile b --engines echo --option delay_ms=1.5",
    ]
    assert misfits(repository, *blocks) == []


@pytest.mark.parametrize(
    ("format_", "engine", "command"),
    [
        ("echo", "auto", "blockflow profile a --engines echo --precisions fp32"),
        ("pt2", "openvino", "blockflow convert a@1 --to onnx"),
        ("echo", "openvino", ""),  # no command makes an ONNX model of it
        ("echo", "exported", ""),
    ],
)
def test_a_blocks_state_names_a_command_or_none(
    repository: BlockRepository, format_: str, engine: str, command: str
) -> None:
    spec = BlockSpec(name="a", engine=engine)
    info = replace(repository.info("a"), format=format_)
    told = ProfileShelf(repository.root).state(spec, info)
    assert (told["fresh"], told["command"]) == (False, command), told


def test_commands_can_be_pasted_into_a_shell() -> None:
    options = {"memory_format": "channels_last", "spin": True}
    chain = Subject(("a@2", "b"), "exported", "bf16", options, chain=True)
    words = shlex.split(chain.command([1, 6]))
    assert words[2:] == [
        *("--chain", "a@2,b", "--engines", "exported", "--precisions", "bf16"),
        *("--option", 'memory_format="channels_last"', "--option", "spin=true"),
        *("--threads", "1,6"),
    ]
    assert commands([(Subject(("a",)), 1), (Subject(("a",)), 3)]) == (
        "blockflow profile a --threads 1,3"
    )
    chains = [(Subject(blocks, chain=True), 1) for blocks in (("a", "b"), ("c", "d"))]
    assert commands(chains) == "blockflow profile --chain a,b && blockflow profile --chain c,d"


def test_a_chain_is_measured_with_rows_that_all_its_blocks_take(
    repository: BlockRepository,
) -> None:
    wide = repository.info("a")
    taken = replace(wide.contract.input, ranges={**wide.contract.input.ranges, ROWS: (1, 12)})
    narrow = replace(wide, name="narrow", contract=replace(wide.contract, input=taken))
    wish = run.Wish(["echo"], ["fp32"], threads=[1])
    assert [cell.rows for cell in run.axes((wide, narrow), wish)] == [1, 2, 4, 8, 12]
    with pytest.raises(RequestError, match="16 rows: narrow takes up to 12"):
        run.axes((wide, narrow), replace(wish, rows=[16]))
