"""Batching policies in real workers: what shares a block shares its batches; nothing is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blockflow.core.model import BlockInfo
from blockflow.core.profile import Point, StageProfile
from blockflow.core.routing import RouteTable
from blockflow.wire.control import Routes, RoutesApplied, SetPolicy, StartFailed, Stats
from tests import worker_rig
from tests.worker_rig import Rig, answers, echo

rig = worker_rig.rig


def rows_of(value: float, rows: int = 1) -> np.ndarray[Any, Any]:
    return np.full((rows, 4), value, np.float32)


def profile(info: BlockInfo, ms: Mapping[int, float]) -> dict[str, Any]:
    """As if measured: milliseconds by rows, on one thread."""
    points = tuple(
        Point(1, rows, None, 30, t, t, t, t, t, t, 0.01, 0) for rows, t in sorted(ms.items())
    )
    return StageProfile(info.name, info.digest, "echo", "fp32", "test", points).to_dict()


def batches(rig: Rig, incarnation: int, rows: int) -> dict[str, int]:
    """How many batches each block ran ``rows`` rows in, once its figures show all of them."""
    while True:
        stages = rig.expect(Stats, incarnation).stages
        if all(s["rows"] >= rows for s in stages):
            assert all(s["rows"] == rows for s in stages)
            return {s["block"]: s["batches"] for s in stages}


def test_tasks_share_the_batches_of_their_trunk(rig: Rig) -> None:
    """While one request is computed others gather; they run as one batch and part afterwards."""
    rig.start(
        11,
        {1: echo(rig, "trunk", delay_ms=100)},
        stage={"policy": {"policy": "window", "max_rows": 32, "max_delay_ms": 0}},
        monitor_hz=50.0,
    )
    rig.start(12, {2: echo(rig, "head2")})
    rig.start(13, {3: echo(rig, "head3")})
    rig.publish()
    sent = {rig.send(rows_of(k), [1, 2 + k % 2])[0]: float(k) for k in range(12)}
    answers(rig, sent)
    assert batches(rig, 11, 12)["trunk"] <= 3


def test_a_window_waits_for_company_and_no_longer(rig: Rig) -> None:
    policy = {"policy": "window", "max_rows": 4, "max_delay_ms": 60_000}
    rig.start(11, {1: echo(rig, "e")}, stage={"policy": policy}, monitor_hz=50.0)
    rig.publish()
    sent = {rig.send(rows_of(k), [1])[0]: float(k) for k in range(4)}
    answers(rig, sent)  # full: long before the delay has passed
    (lone,) = rig.send(rows_of(9), [1], remaining_ms=2000)
    answers(rig, {lone: 9.0})  # its deadline does not wait for company either
    assert batches(rig, 11, 5)["e"] == 2


@pytest.mark.parametrize(
    ("policy", "last"),
    [
        ({"policy": "window"}, 2),
        ({"policy": "lbci", "t_opt_ms": 2000}, 1),
        ({"policy": "dvabatch", "buffer_pairs": 2}, 1),
        ({"policy": "dvabatch", "policies": ["load", "operator"]}, 1),
    ],
    ids=["window", "lbci", "dvabatch", "dvabatch-operator"],
)
def test_newcomers_join_a_batch_under_way(rig: Rig, policy: Mapping[str, Any], last: int) -> None:
    """A chain in one worker: who comes while one request is in the middle of it runs the first
    blocks after it, and the last one with it. A window, which is closed, runs all of them apart."""
    blocks = {n: echo(rig, f"s{n}", delay_ms=600 if n == 2 else 10) for n in (1, 2, 3)}
    # Batches cost what one row costs, and a fixed time is half of it: joining pays.
    costs = {1: 20.0, 2: 20.5, 4: 21.0, 8: 22.0, 16: 24.0, 32: 28.0}
    launch = {"policy": dict(policy), "profile": profile(blocks[1], costs), "max_rows": 32}
    rig.start(11, blocks, stage=launch, monitor_hz=50.0)
    rig.publish()
    sent = {rig.send(rows_of(0), [1, 2, 3])[0]: 0.0}
    while rig.expect(Stats, 11).stages[0]["batches"] == 0:
        pass
    for k in range(1, 9):
        sent[rig.send(rows_of(k, 1 + k % 3), [1, 2, 3])[0]] = float(k)
    answers(rig, sent)
    found = batches(rig, 11, 1 + sum(1 + k % 3 for k in range(1, 9)))
    assert found == {"s1": 2, "s2": 2, "s3": last}


def test_who_is_run_again_alone_has_the_time_out_for_himself(rig: Rig) -> None:
    """One of a batch fails: its mates' forwards take longer than ``timeout_ms`` together only."""
    stage = {"policy": {"policy": "window", "max_rows": 8}, "timeout_ms": 300}
    rig.start(11, {1: echo(rig, "e", delay_ms=60, fail_on_value=99)}, stage=stage)
    rig.publish()
    values = [0.0, 1.0, 2.0, 99.0, 4.0, 5.0, 6.0, 7.0]
    x = np.repeat(np.array(values, np.float32)[:, None], 4, axis=1)
    sent = dict(zip(rig.send(x, [1], rows=[1] * 8), values, strict=True))
    guilty = next(r for r, value in sent.items() if value == 99.0)
    del sent[guilty]
    answers(rig, sent)
    assert [i.request_id for i in rig.failure().items] == [guilty]
    assert rig.children[11].poll() is None, "the worker goes on"


def test_a_block_that_must_not_run_twice_fails_its_batch(rig: Rig) -> None:
    """Whoever shared the failed batch has begun there: running him alone would be a second time."""
    stage = {"policy": {"policy": "window", "max_rows": 4}}
    rig.start(11, {1: echo(rig, "e", fail_on_value=99)}, stage=stage)
    rig.routes[1] = replace(rig.routes[1], replayable=False)
    rig.publish()
    x = np.array([[0.0] * 4, [99.0] * 4, [2.0] * 4], np.float32)
    sent = rig.send(x, [1], rows=[1] * 3)
    failures = [rig.failure() for _ in sent]
    assert {f.error.code for f in failures} == {"BLOCK_FAILED"}
    assert all("must not run twice" in f.error.message for f in failures)
    assert sorted(f.items[0].request_id for f in failures) == sorted(sent)
    (alone,) = rig.send(rows_of(1), [1])
    answers(rig, {alone: 1.0})


def test_a_policy_without_its_profile_says_how_to_get_one(rig: Rig) -> None:
    rig.launch(11, {1: echo(rig, "e")}, stage={"policy": {"policy": "lbci", "t_opt_ms": 100}})
    failed = rig.expect(StartFailed, 11)
    assert failed.error["code"] == "INVALID_TOPOLOGY"
    assert "blockflow profile" in str(failed.error)


def test_policies_and_shares_change_under_load(rig: Rig) -> None:
    rig.start(11, {n: echo(rig, f"e{n}", delay_ms=2) for n in (1, 2)})
    rig.publish()
    sent: dict[bytes, float] = {}
    policies = ("window", "dvabatch", "none", "window")
    for k in range(60):
        sent[rig.send(rows_of(k), [1, 2])[0]] = float(k)
        if k % 15 == 8:
            for stage in (1, 2):
                rig.tell(11, SetPolicy(stage, {"policy": policies[k // 15]}))
        if k % 15 == 12:
            shares = ({}, {"weight": 1.0 + k, "priority": k // 15, "max_batch_rows": 4})
            rig.version += 1
            table = RouteTable(1, rig.version, dict(rig.routes), {}, shares)
            rig.tell(11, Routes(table.to_dict()))
            rig.expect(RoutesApplied, 11)
    answers(rig, sent)
