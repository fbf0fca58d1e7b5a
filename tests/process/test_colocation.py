"""Several blocks in one worker: tensors pass without sockets, slots or copies, and unharmed."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, TensorSpec
from blockflow.launch.process_kpi import private_and_shared
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.wire.control import Monitor, Stats
from blockflow.wire.data import Data, Failure
from tests import worker_rig
from tests.worker_rig import WAIT_S, Rig, echo

Array = np.ndarray[Any, Any]


rig = worker_rig.rig


def numbers(rows: int, *dims: int, start: float = 0.0) -> Array:
    count = rows * int(np.prod(dims or (4,)))
    return (np.arange(count, dtype=np.float32) + start).reshape(rows, *(dims or (4,)))


def settled(rig: Rig, incarnation: int, requests: int) -> dict[int, Any]:
    """Its stages by number, once all have served so many requests and no slot is out any more."""
    rig.tell(incarnation, Monitor(50.0))
    end = time.monotonic() + WAIT_S
    while True:
        stats = rig.expect(Stats, incarnation)
        stages = {s["stage"]: s for s in stats.stages}
        served = min(s["requests"] + s["failures"] for s in stages.values())
        if served >= requests and not stats.process["slots_used"]:
            rig.tell(incarnation, Monitor(0.0))
            return stages
        assert time.monotonic() < end, (served, stats.process["slots_used"])


def out(stage: dict[str, Any]) -> tuple[int, int]:
    return stage["bytes_out"], stage["copies_out"]


def test_only_the_last_output_of_a_chain_takes_a_slot(rig: Rig) -> None:
    rig.start(11, {n: echo(rig, f"e{n}") for n in (1, 2, 3)}, slots=1, arena_bytes=1 << 16)
    rig.publish()
    for k in range(10):
        x = numbers(3, start=k)
        rig.send(x, [1, 2, 3])
        np.testing.assert_array_equal(rig.result()[1], x)
    stages = settled(rig, 11, 10)
    assert [out(stages[n]) for n in (1, 2)] == [(0, 0), (0, 0)]
    assert out(stages[3]) == (10 * 3 * 4 * 4, 10)  # echo cannot write into the slot itself


def test_an_output_for_both_sides_is_written_once(rig: Rig) -> None:
    """A tree 1 -> (2, 3 -> 5, 4): 2, 3 and 5 here, 4 elsewhere, and 1 is an answer as well."""
    rig.start(11, {n: echo(rig, f"e{n}") for n in (1, 2, 3, 5)})
    rig.start(12, {4: echo(rig, "e4")})
    rig.publish()
    for k in range(5):
        x = numbers(2, start=k)
        rig.send(x, [1], [1, 2], [1, 3, 5], [1, 4])
        ends = []
        for _ in range(4):
            message, y = rig.result()
            np.testing.assert_array_equal(y, x)
            ends.append(message.items[0].path.nodes[message.items[0].hop].stage)
        assert sorted(ends) == [1, 2, 4, 5]
    stages = settled(rig, 11, 5)
    size = 2 * 4 * 4
    assert out(stages[1]) == (5 * size, 5)
    assert out(stages[3]) == (0, 0)


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_row_that_fails_here_fails_alone(rig: Rig, bad: int) -> None:
    """The batch's rows come in one message; one of them fails at stage ``bad``."""
    batching = {"policy": {"policy": "window", "max_rows": 8, "max_delay_ms": 20}}
    blocks = {n: echo(rig, f"e{n}", fail_on_value=13 if n == bad else -1) for n in (1, 2, 3)}
    rig.start(11, blocks, stage=batching)
    rig.publish()
    x = numbers(4)
    x[1, 0] = 13
    ids = rig.send(x, [1, 2], [1, 3], rows=[1, 1, 2])
    good: dict[tuple[bytes, int], Array] = {}
    failed: list[tuple[bytes, int]] = []
    while sum(len(i) for i in (good, failed)) < 5 + (bad > 1):
        message, frame, _ = rig.receive_full()
        for item in message.items:
            stage = item.path.nodes[item.hop].stage
            if isinstance(message, Failure):
                failed.append((item.request_id, stage))
        if isinstance(message, Data):
            rows = rig.read(message.tensor, frame)
            for item in message.items:
                stage = item.path.nodes[item.hop].stage
                good[item.request_id, stage], rows = rows[: item.rows], rows[item.rows :]
    assert failed == [(ids[1], bad)]
    parts = {ids[0]: x[:1], ids[1]: x[1:2], ids[2]: x[2:]}
    for (request, _), y in good.items():
        np.testing.assert_array_equal(y, parts[request])
    settled(rig, 11, 2)


def views(rig: Rig) -> tuple[list[BlockInfo], nn.Module]:
    """Blocks that begin and end with views of their input, and one that is nothing else."""
    model = nn.Sequential(
        nn.Flatten(1, 2),
        nn.Sequential(nn.Unflatten(1, (4, 2)), nn.Flatten()),
        nn.Identity(),
        nn.Linear(16, 3),
    ).eval()
    spec = TensorSpec("float32", ("rows", 4, 2, 2))
    repository = BlockRepository(rig.repository)
    report = export_model(
        LoadedModel(model, "test", spec), repository, prefix="v", cuts=["1", "2", "3"]
    )
    return [repository.info(name) for name in report.paths[0]], model


def test_blocks_that_only_view_do_not_pass_on_what_is_released(rig: Rig) -> None:
    torch.manual_seed(3)
    infos, model = views(rig)
    rig.start(11, dict(enumerate(infos, start=1)))
    rig.publish()
    path = list(range(1, len(infos) + 1))
    sent = [numbers(2, 4, 2, 2, start=k) for k in range(30)]
    # Many at once: a slot that was released too early is soon written anew.
    for x in sent:
        rig.send(x, path)
    for x in sent:
        with torch.inference_mode():
            expected = model(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(rig.result()[1], expected, rtol=1e-5, atol=1e-4)
    rig.shm.sweep()
    assert rig.shm.outstanding() == 0


def test_siblings_see_the_same_output(rig: Rig) -> None:
    """Two blocks that begin with an operation in place share their input."""
    torch.manual_seed(4)
    heads = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)).eval() for _ in range(2)]
    repository = BlockRepository(rig.repository)
    spec = TensorSpec("float32", ("rows", 4))
    infos = {}
    for n, head in enumerate(heads, start=2):
        report = export_model(
            LoadedModel(nn.Sequential(head), "test", spec), repository, prefix=f"h{n}"
        )
        infos[n] = repository.info(report.paths[0][0])
    rig.start(11, {1: echo(rig, "e1"), **infos, 4: echo(rig, "e4")})
    rig.publish()
    x = -numbers(3) + 5
    rig.send(x, [1, 2], [1, 3], [1, 4])
    for _ in range(3):
        message, y = rig.result()
        stage = message.items[0].path.nodes[message.items[0].hop].stage
        expected = x
        if stage != 4:
            with torch.inference_mode():
                expected = heads[stage - 2](torch.from_numpy(x.copy())).numpy()
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_memory_does_not_grow_with_what_has_passed(rig: Rig) -> None:
    size = 64 * 1024
    infos = {n: echo(rig, f"e{n}", dims=(size,)) for n in (1, 2, 3)}
    rig.start(11, infos)
    rig.start(12, {4: echo(rig, "e4", dims=(size,))})
    rig.publish()
    x = numbers(1, size)

    def passes(count: int) -> int:
        for _ in range(count):
            rig.send(x, [1, 2, 3], [1, 4])
            rig.result()
            rig.result()
        return private_and_shared(rig.children[11].pid)[0]

    before = passes(20)
    # A tenth of what it would be if each pass left one tensor; its threads' heaps take some.
    assert passes(200) - before < 20 * x.nbytes
    settled(rig, 11, 220)


def test_a_slot_held_for_a_sibling_here_does_not_stop_the_worker(rig: Rig) -> None:
    """1 -> (2 here, 3 elsewhere): the output of 1 keeps the only slot while 2 needs it."""
    rig.start(11, {n: echo(rig, f"e{n}") for n in (1, 2)}, slots=1, arena_bytes=1 << 16)
    rig.start(12, {3: echo(rig, "e3")})
    rig.publish()
    x = numbers(2)
    rig.send(x, [1, 2], [1, 3], remaining_ms=3000)
    for _ in range(2):
        np.testing.assert_array_equal(rig.result()[1], x)


def test_slots_held_for_a_window_here_do_not_stop_the_worker(rig: Rig) -> None:
    """While 2 collects its batch, the outputs of 1 that wait for it hold all the slots."""
    infos = {n: echo(rig, f"e{n}") for n in (1, 2)}
    window = {"policy": "window", "max_rows": 16, "max_delay_ms": 50}
    stages = (StageSpec(1, infos[1]), StageSpec(2, infos[2], policy=window))
    rig.start(11, infos, stages=stages, slots=4, arena_bytes=1 << 16)
    rig.start(12, {3: echo(rig, "e3")})
    rig.publish()
    sent = [numbers(1, start=k) for k in range(12)]
    for x in sent:
        rig.send(x, [1, 2], [1, 3], remaining_ms=4000)
    answered = 0
    while answered < 2 * len(sent):  # one message may bring several
        answered += len(rig.result()[0].items)
