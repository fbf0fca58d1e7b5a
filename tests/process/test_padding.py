"""Inputs of several lengths in one batch of real workers: each result is as it would be alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blockflow.client.sync import Client
from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.model import Padding, TensorSpec
from blockflow.core.profile import Point, StageProfile
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import load_model
from blockflow.wire.control import Stats
from tests import worker_rig
from tests.system_rig import idle_system
from tests.worker_rig import Rig

Array = np.ndarray[Any, Any]
MakeRig = Callable[[], AbstractContextManager[Rig]]

SIZES = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 32, "max_length": 32}
TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (1, 32)})
CLASSES = [8, 32]
NAMES = ("embed", "layer1", "layer2", "norm")


rig = worker_rig.rig


@pytest.fixture(scope="module")
def encoder(
    worker_rigs: MakeRig, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BlockRepository, nn.Module]:
    """An encoder to one vector per token, in four blocks, and the whole of it."""
    loaded = load_model(
        "transformer-tokens", arguments=SIZES, input_spec=TOKENS, int_below=32, seed=7
    )
    repository = BlockRepository(tmp_path_factory.mktemp("encoder"))
    export_model(loaded, repository, names=NAMES, cuts=["layers", "layers.1", "norm"])
    return repository, loaded.module


def serve(
    rig: Rig,
    encoder: tuple[BlockRepository, nn.Module],
    workers: Sequence[Sequence[int]],
    **more: Any,
) -> None:
    """Start the encoder's blocks, stages 1 to 4, in these workers (from incarnation 11 on)."""
    rig.repository = encoder[0].root
    for i, stages in enumerate(workers):
        blocks = {n: encoder[0].info(NAMES[n - 1]) for n in stages}
        rig.start(11 + i, blocks, monitor_hz=50.0, **more)
    rig.publish()


def full_batches(rows: int) -> dict[str, Any]:
    """A batch starts when so many rows are there, and not before."""
    return {"policy": "window", "max_rows": rows, "max_delay_ms": 60_000, "classes": CLASSES}


def ask(rig: Rig, path: Sequence[int], lengths: Sequence[tuple[int, int]]) -> dict[bytes, Array]:
    """Send inputs of (rows, length): request id -> tokens. Token 0 occurs: it may."""
    rng = np.random.default_rng(3)
    sent = {}
    for rows, length in lengths:
        x = rng.integers(0, 32, (rows, length))
        sent[rig.send(x, path, remaining_ms=60_000)[0]] = x
    return sent


def check(rig: Rig, sent: Mapping[bytes, Array], expected: Callable[[Array], Array]) -> None:
    left = dict(sent)
    while left:
        message, value = rig.result()
        row = 0
        for item in message.items:
            mine = value[row : row + item.rows]
            np.testing.assert_allclose(mine, expected(left.pop(item.request_id)), atol=1e-4)
            row += item.rows
        assert row == len(value)


def alone(model: nn.Module) -> Callable[[Array], Array]:
    def run(x: Array) -> Array:
        with torch.inference_mode():
            out: Array = model(torch.from_numpy(x)).numpy()
        return out

    return run


def figures(rig: Rig, incarnation: int, rows: int) -> dict[str, dict[str, Any]]:
    """Each block's figures, once they show that so many rows have run."""
    while True:
        stages = rig.expect(Stats, incarnation).stages
        if all(s["rows"] >= rows for s in stages):
            return {s["block"]: s for s in stages}


MIXED = [(1, 3), (2, 8), (1, 32), (3, 5), (1, 1)]
"""(rows, length) of 8 rows; class 8 has 7 of them, with 3 + 16 + 15 + 1 tokens."""


@pytest.mark.parametrize(
    "workers", [((1, 2, 3, 4),), ((1, 2), (3, 4)), ((1,), (2,), (3,), (4,))], ids=len
)
def test_results_are_those_of_each_alone(
    rig: Rig, encoder: tuple[BlockRepository, nn.Module], workers: Sequence[Sequence[int]]
) -> None:
    serve(rig, encoder, workers, stage={"policy": full_batches(7)})
    sent = ask(rig, [1, 2, 3, 4], [m for m in MIXED if m[1] <= 8])
    check(rig, sent, alone(encoder[1]))
    for i, stages in enumerate(workers):
        shown = figures(rig, 11 + i, 7)
        for n in stages:
            block = shown[NAMES[n - 1]]
            assert (block["requests"], block["rows"], block["batches"]) == (4, 7, 1)
            width = 1 if n == 1 else 16
            assert block["elements_in"] == 7 * 8 * width
            assert block["elements_padded"] == (56 - 35) * width
            # put together where it comes in; within the worker it goes on as it is
            copies, size = int(n == stages[0]), 8 if n == 1 else 4
            assert block["copies_in"] == copies
            assert block["bytes_copied_in"] == copies * 56 * width * size


def test_classes_do_not_mix(rig: Rig, encoder: tuple[BlockRepository, nn.Module]) -> None:
    """The one of length 32 is no mate of the others: nobody is padded to its length."""
    serve(rig, encoder, [(1, 2, 3, 4)], stage={"policy": full_batches(7)})
    sent = ask(rig, [1, 2, 3, 4], [*MIXED, (7, 32)])
    check(rig, sent, alone(encoder[1]))
    block = figures(rig, 11, 15)["embed"]
    assert block["elements_padded"] == 56 - 35


def test_whole_tensors_are_cut_too(rig: Rig, encoder: tuple[BlockRepository, nn.Module]) -> None:
    """The way between hosts: what travels is a frame."""
    serve(rig, encoder, [(1, 2), (3, 4)], stage={"policy": full_batches(7)}, mode="zeromq")
    check(rig, ask(rig, [1, 2, 3, 4], MIXED[:2] + MIXED[3:]), alone(encoder[1]))


@pytest.mark.parametrize(
    "policy",
    [
        {"policy": "dvabatch", "policies": ["load", "input"], "bs_max": 8},
        {"policy": "lbci", "t_opt_ms": 1000},
    ],
    ids=lambda p: str(p["policy"]),
)
def test_batches_that_grow_and_part(
    rig: Rig, encoder: tuple[BlockRepository, nn.Module], policy: Mapping[str, Any]
) -> None:
    """Joins at block boundaries and branches: a task ends in the middle, others go on."""
    points = [Point(1, rows, None, 30, *[ms] * 6, 0.01, 0) for rows, ms in ((1, 1.0), (8, 2.0))]
    made_up = StageProfile("any", "0" * 64, "exported", "fp32", "test", tuple(points)).to_dict()
    stage = {"policy": {**policy, "classes": CLASSES}, "max_rows": 8, "profile": made_up}
    serve(rig, encoder, [(1, 2, 3), (4,)], stage=stage)
    model = encoder[1]
    half = nn.Sequential(model.embedding, model.layers[0])
    lengths = [(1 + k % 3, 1 + 5 * k % 32) for k in range(24)]
    whole, part = ask(rig, [1, 2, 3, 4], lengths[::2]), ask(rig, [1, 2], lengths[1::2])

    def expected(x: Array) -> Array:
        chosen = part if any(x is y for y in part.values()) else whole
        return alone(half if chosen is part else model)(x)

    check(rig, {**whole, **part}, expected)


def test_a_bad_item_fails_alone(rig: Rig) -> None:
    """Its mates are run again, padded as before, and cut as before."""
    length = TensorSpec("float32", ("rows", "length"), {"length": (1, 8)})
    info = save_echo(
        BlockRepository(rig.repository),
        "e",
        length,
        settings={"fail_on_value": 13},
        padding=Padding("length", -1),
    )
    rig.start(11, {1: info}, stage={"policy": {**full_batches(4), "classes": [8]}})
    rig.publish()
    inputs = [np.full((1, n), v, np.float32) for n, v in ((2, 1), (8, 13), (5, 2), (5, 3))]
    sent = {rig.send(x, [1], remaining_ms=60_000)[0]: x for x in inputs}
    (guilty,) = (k for k, x in sent.items() if x[0, 0] == 13)
    del sent[guilty]
    seen: dict[bytes, Array] = {}
    failed: list[bytes] = []
    while len(seen) + len(failed) < 4:
        message, frame, _ = rig.receive_full()
        if hasattr(message, "error"):
            failed += [i.request_id for i in message.items]
            continue
        value = rig.read(message.tensor, frame)
        for row, item in enumerate(message.items):
            seen[item.request_id] = value[row : row + 1]
    assert failed == [guilty]
    assert {k: v.tolist() for k, v in seen.items()} == {k: v.tolist() for k, v in sent.items()}


def test_the_whole_system(
    rig: Rig, encoder: tuple[BlockRepository, nn.Module], tmp_path: Path
) -> None:
    """Clients get what is theirs of a batch, and a typed error for what no class holds."""
    repository, model = encoder
    save_echo(repository, "plain", TOKENS)

    def update(name: str, batching: Mapping[str, Any]) -> dict[str, Any]:
        names = list(NAMES) if name == "encode" else [name]
        blocks = [{"name": n, "worker": name, "batching": batching} for n in names]
        return {"blocks": blocks, "tasks": {name: names}}

    batching = {"policy": "window", "max_rows": 6, "max_delay_ms": 100, "classes": [8, 16]}
    with (
        idle_system(repository.root, tmp_path / "state", rig.launcher) as system,
        Client(system.client_endpoint) as client,
    ):
        with pytest.raises(TopologyError) as e:
            system.apply(update("plain", batching))
        (problem,) = e.value.problems
        assert problem.path == "$.blocks[0].batching.classes"
        assert "block 'plain' does not promise" in problem.message
        system.apply(update("encode", batching))
        assert client.tasks()["encode"].contract.input.ranges == {"length": (1, 16)}
        with pytest.raises(RequestError) as refused:
            client.infer("encode", np.ones((1, 17), np.int64), deadline_s=60)
        assert refused.value.code == "CONTRACT_MISMATCH"
        assert "dim 1 (length) is outside 1..16" in refused.value.message
        rng = np.random.default_rng(5)
        inputs = [rng.integers(0, 32, (2, n)) for n in (3, 8, 6)]
        asked = [client.submit("encode", x, deadline_s=60) for x in inputs]
        for x, pending in zip(inputs, asked, strict=True):
            np.testing.assert_allclose(pending.result().value, alone(model)(x), atol=1e-4)
        system.apply(update("encode", {**batching, "classes": [32]}))
        x = rng.integers(0, 32, (6, 32))
        value = client.infer("encode", x, deadline_s=60).value
        np.testing.assert_allclose(value, alone(model)(x), atol=1e-4)
