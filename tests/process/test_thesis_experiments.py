"""The thesis's experiments with real processes, in their smallest form: echo blocks, few rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from copy import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from thesis_rig import context

from blockflow.bench.contenders import CONTENDERS, Contender, Model
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.thesis import (
    batches,
    components,
    copies,
    experiment,
    one_client,
    pipeline_time,
    transports,
)
from blockflow.bench.thesis.beside import AGAIN
from blockflow.bench.thesis.experiment import Context, Findings, Workshop
from blockflow.bench.thesis.http_server import TEXT, HttpClient
from blockflow.bench.thesis.one_client import HTTP, HTTP_JSON, OFFLINE
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.launch.base import Launcher
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from tests.apart_rig import forked

pytestmark = pytest.mark.timeout(300)

FLOATS = 4096
BLOCKS = 3  # of the digits model, for which echo blocks stand: nothing to export


def store_echoes(model: Model, contender: Contender, root: Path) -> None:
    for name in model.chain(contender, root).blocks:
        save_echo(BlockRepository(root), name, TensorSpec("float32", ("rows", FLOATS)))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[Context]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONTENDERS, "echo", Contender("echo", "auto"))  # type: ignore[arg-type]
        patch.setattr(experiment, "prepare_apart", store_echoes)
        patch.setattr(experiment, "System", partial(System, launcher=launcher))
        forked(launcher, patch)
        yield context(tmp_path_factory.mktemp("thesis"), engine="echo")


@pytest.fixture(scope="module")
def ways(made: Context) -> Iterator[one_client.Bench]:
    """A system, the model in one process, and the model behind HTTP, for all of the module."""
    with one_client.bench(made, http=True) as found:
        yield found


def modes(found: Findings, name: str) -> set[str]:
    return {f.mode for f in found.figures if f.name == name}


def test_transports(tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    forked(launcher, monkeypatch)
    found = transports.run(context(tmp_path))
    ways = {(f.name, f.mode) for f in found.figures if f.unit == "ms"}
    assert ways == {
        *((kind, way) for kind in ("string", "JSON", "tensor") for way in transports.WAYS[:3]),
        *(("tensor", way) for way in transports.WAYS[3:]),
    }
    assert all(f.value > 0 and f.n >= 5 for f in found.figures if f.unit == "ms")


def test_one_client_by_every_way(
    made: Context, ways: one_client.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three experiments one after the other, on a system that is started once for all of them."""
    made.kept = []
    lone = copy(ways)
    monkeypatch.setattr(lone, "_server", None)  # the others are not compared with HTTP
    monkeypatch.setattr(one_client, "bench", lambda _, http: nullcontext(ways if http else lone))
    times, parts, sizes = (e.run(made) for e in (pipeline_time, components, batches))
    names = {HTTP, HTTP_JSON, ZEROMQ, TENSORMQ, OFFLINE}
    assert modes(times, pipeline_time.TIME) == names
    rows = times.data[0].rows
    assert {row[0] for row in rows} == names | {TENSORMQ + AGAIN}
    assert all(computing > 0 and trip > 0 for _, _, computing, trip in rows)
    blocks = {f.labels["block"] for f in parts.figures if f.name == components.OVERHEAD}
    assert blocks == {f"block{n + 1}" for n in range(BLOCKS)}
    assert modes(sizes, batches.GROWTH) == {ZEROMQ, TENSORMQ}
    assert {f.batch for f in sizes.figures if f.name == batches.TIME} == {1, 4}
    assert made.kept == []  # nothing broke off


def test_bytes_are_counted_by_the_kernel(made: Context) -> None:
    reason = copies.EXPERIMENT.needs[0](made.settings)
    if reason is not None:
        pytest.skip(reason)
    found = copies.run(made)
    sent = {f.mode: f.value * 1e6 for f in found.figures if f.name == copies.SOCKETS}
    tensor = FLOATS * 4
    # To every block and to the Dispatcher; whatever else uses the loopback device adds to it.
    assert sent[ZEROMQ] >= BLOCKS * tensor
    assert sent[TENSORMQ] >= 0
    each = {f.mode: f.value for f in found.figures if f.name == copies.PER_BLOCK}
    assert each[ZEROMQ] == pytest.approx(sent[ZEROMQ] / BLOCKS)
    first = next(f for f in found.figures if f.name == copies.FIRST)
    assert tensor < first.value * 1e6 < 3 * tensor  # a sample of the KPIs may be between two counts


# --- the HTTP server -----------------------------------------------------------------------------


def test_the_server_answers_with_the_models_result(ways: one_client.Bench) -> None:
    """Until it ends; no test after this one asks it."""
    x = np.arange(2 * FLOATS, dtype=np.float32).reshape(2, FLOATS)
    server = ways._server
    assert server is not None
    with HttpClient(server.port) as client:
        y = np.frombuffer(client.post("/infer", x.data.cast("B")), np.float32)
        assert np.array_equal(y, x.ravel())
        with HttpClient(server.port, keep=False) as other:
            text = b"[[" + b"0," * (FLOATS - 1) + b"1]]"
            assert other.post("/infer", text, TEXT).endswith(b"1.0]]")
            assert other.post("/string", b"again") == b"again"
        with pytest.raises(BlockFlowError, match="404"):
            client.post("/nothing", b"")
        server.close()
        with pytest.raises(BlockFlowError, match="CONNECTION_LOST"):
            client.post("/string", b"")


def test_blocks_are_exported_once_for_all_experiments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def prepare(model: Model, contender: Contender, root: Path) -> None:
        asked.append(f"{model.name}, {contender.label}, {root.name}")

    monkeypatch.setattr(experiment, "prepare_apart", prepare)
    workshop = Workshop(tmp_path)
    for _ in range(2):
        made = context(tmp_path, workshop, device="cuda:0")
        assert made.chain().device == "cuda:0"
        assert made.chain("torchscript", "resnet18").blocks[0] == "torchscript-traced.block1"
    # Two models have the same names for their blocks: each has a repository of its own.
    assert asked == ["digits, exported, digits", "resnet18, torchscript, resnet18"]
