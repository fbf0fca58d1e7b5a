"""The demo's parts that need no system: data, topologies, report and picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from blockflow.bench.demo import picture, report
from blockflow.bench.demo.blocks import SHARED, one_worker_topology, separate_topology
from blockflow.bench.demo.data import HELD_OUT, TASKS, labels, load_data
from blockflow.bench.demo.measure import Deployment, JointFigures, Memory, TaskFigures, accuracy
from blockflow.bench.demo.run import Outcome, read_topology
from blockflow.bench.demo.server import Leftovers
from blockflow.cli.main import main
from blockflow.client.collector import BlockMeans
from blockflow.core.errors import BlockFlowError

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def deployment(name: str, memory: Memory, joint: JointFigures | None = None) -> Deployment:
    tasks = {
        t: TaskFigures(
            t,
            0.99,
            (1.0, 2.0, 3.0),
            200.0,
            (
                BlockMeans("trunk1", 3, 0.1, 0.1, 0.1, i + 1.0),
                BlockMeans(f"head_{t}", 3, 0.1, 0.0, 0.1, 0.2),
            ),
        )
        for i, t in enumerate(TASKS)
    }
    return Deployment(name, ("trunk1",), tasks, joint, memory)


def deployments() -> list[Deployment]:
    joint = JointFigures(dict.fromkeys(TASKS, 0.99), (2.0, 3.0, 4.0), 150.0)
    return [
        deployment("modular", Memory(5, 8 * MIB, 60 * MIB, 70 * MIB), joint),
        deployment("separate models", Memory(3, 24 * MIB, 55 * MIB, 66 * MIB)),
    ]


def test_the_images_are_parted_once_and_for_all() -> None:
    data = load_data(seed=7)
    again = load_data(seed=7)
    assert data.train_images.shape == (1797 - HELD_OUT, 1, 8, 8)
    assert data.test_images.shape == (HELD_OUT, 1, 8, 8)
    assert data.test_images.dtype == np.float32
    assert 0.0 <= data.test_images.min() < data.test_images.max() <= 1.0
    np.testing.assert_array_equal(data.test_digits, again.test_digits)
    assert not np.array_equal(data.test_digits, load_data(seed=8).test_digits)


def test_labels_follow_from_the_digit() -> None:
    digits = np.arange(10)
    assert labels("digit", digits).tolist() == list(range(10))
    assert labels("parity", digits).tolist() == [0, 1] * 5
    assert labels("high", digits).tolist() == [0] * 5 + [1] * 5
    with pytest.raises(ValueError, match="unknown task"):
        labels("colour", digits)


def test_accuracy_counts_the_largest_logit() -> None:
    logits = np.array([[0.1, 0.9], [0.8, 0.2]], dtype=np.float32)
    assert accuracy(logits, np.array([1, 1])) == 0.5


def test_the_shipped_topology_deploys_the_demo_blocks() -> None:
    topology = read_topology(ROOT / "topology.json")
    assert topology["blocks"] == list(SHARED)
    assert topology["tasks"] == {t: ["trunk1", "trunk2", f"head_{t}"] for t in TASKS}


def test_variants_serve_the_same_tasks() -> None:
    topology = read_topology(ROOT / "topology.json")
    one = one_worker_topology(topology, "all")
    assert one["tasks"] == topology["tasks"]
    assert {b["worker"] for b in one["blocks"]} == {"all"}
    separate = separate_topology()
    assert set(separate["tasks"]) == set(TASKS)
    assert all(len(path) == 1 for path in separate["tasks"].values())


@pytest.mark.parametrize(
    ("text", "code"),
    [(None, "NOT_FOUND"), ("{", "BAD_BODY"), ("[]", "BAD_BODY"), ('{"tasks": []}', "BAD_BODY")],
)
def test_a_bad_topology_file_is_a_typed_error(tmp_path: Path, text: str | None, code: str) -> None:
    path = tmp_path / "t.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BlockFlowError) as caught:
        read_topology(path)
    assert caught.value.code == code


def test_shared_blocks_are_averaged_over_the_tasks_that_visit_them() -> None:
    means = {b.block: b for b in report.block_means(deployments()[0])}
    assert means["trunk1"].count == 9
    assert means["trunk1"].compute_ms == pytest.approx(2.0)
    assert means["head_parity"].count == 3


def test_the_report_shows_everything_in_80_columns() -> None:
    out = io.StringIO()
    found = deployments()
    report.print_report(Console(file=out, width=80), found, found[-1])
    text = out.getvalue()
    for expected in (
        "99.00%",
        "head_high",
        "on the way",
        "separate models",
        "33%",
        "in one request",
    ):
        assert expected in text
    assert "as above" in text
    assert "outweigh" in text


def test_the_verdict_also_tells_when_sharing_wins() -> None:
    text = report.verdict(Memory(1, 8 * MIB, 20 * MIB, 0), Memory(3, 24 * MIB, 50 * MIB, 0))
    assert "private memory is 40%." in text


def test_figures_are_plain_json() -> None:
    found = report.figures(deployments())
    names = {f.name for f in found}
    assert names >= {"accuracy", "latency", "throughput", "compute", "wait", "overhead", "uss"}
    json.dumps([f.to_dict() for f in found])


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "demo.png"
    picture.draw(deployments(), "a machine", path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("left", [Leftovers((), ()), Leftovers(("trunk1 (7)",), ("slot",))])
def test_what_is_left_behind_is_in_the_one_document(
    left: Leftovers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Done:
        def __init__(self, *_: object) -> None: ...

        def run(self) -> Outcome:
            return Outcome(deployments(), leftovers=left)

    monkeypatch.setattr("blockflow.cli.demo.Demo", Done)
    status = main(["demo", "--json"])
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["left_behind"] == [*left.processes, *left.files]
    if left:
        assert (status, document["error"]["code"]) == (1, "INTERNAL")
        assert "left behind: trunk1 (7), slot" in printed.err
        assert main(["demo"]) == 1
        assert "left behind: trunk1 (7), slot" in capsys.readouterr().err
    else:
        assert status == 0 and "error" not in document
