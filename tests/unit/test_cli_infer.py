"""``blockflow infer`` against a canned Dispatcher: inputs, outputs, failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cli_rig import document
from fake_dispatcher import FakeDispatcher

from blockflow.cli.exits import ExitCode
from blockflow.cli.main import main
from blockflow.core.model import TensorSpec


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDispatcher]:
    with FakeDispatcher() as fake:
        monkeypatch.setenv("BLOCKFLOW_ADDRESS", fake.endpoint)
        yield fake


def test_infer_random(dispatcher: FakeDispatcher, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "echo", "--random", "--rows", "3", "--json"]) == 0
    result = document(capsys)["results"]["echo"]
    assert (result["dtype"], result["dims"], result["epoch"]) == ("float32", [3, 4], 1)
    assert np.array(result["values"]).shape == (3, 4)
    assert [t["block"] for t in result["timings"]] == ["b1", "b2"]
    assert main(["infer", "echo", "--random"]) == 0
    out = capsys.readouterr().out
    assert "echo: float32[1, 4], epoch 1" in out
    assert "b2" in out


def test_infer_files(
    dispatcher: FakeDispatcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import save_file

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.save(tmp_path / "in.npy", x)
    save_file({"x": x, "y": x + 1}, tmp_path / "in.safetensors")
    out = tmp_path / "out.npy"
    assert main(["infer", "echo", "-i", str(tmp_path / "in.npy"), "-o", str(out)]) == 0
    assert np.array_equal(np.load(out), x)
    source = f"{tmp_path}/in.safetensors:y"
    assert main(["infer", "echo", "double", "-i", source, "-o", str(out)]) == 0
    assert np.array_equal(np.load(tmp_path / "out.echo.npy"), x + 1)
    assert np.load(tmp_path / "out.double.npy").shape == (4, 4)


def test_infer_bfloat16_file(
    dispatcher: FakeDispatcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1, 4, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    assert main(["infer", "echo", "-i", str(tmp_path / "b.safetensors"), "--json"]) == 0
    result = document(capsys)["results"]["echo"]
    assert (result["dtype"], result["values"]) == ("bfloat16", [[1.0] * 4])
    assert dispatcher.requests[0].tensor.dtype == "bfloat16"


def test_infer_takes_the_bfloat16_that_it_has_saved(
    dispatcher: FakeDispatcher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(tmp_path / "b.npy")
    with monkeypatch.context() as m:
        m.setattr("fake_dispatcher.SPEC", TensorSpec("bfloat16", ("rows", 4)))
        assert main(["infer", "echo", "--random", "-o", file]) == 0
        assert np.load(file).dtype == "uint16"
        capsys.readouterr()
        assert main(["infer", "echo", "-i", file, "--json"]) == 0
    assert document(capsys)["results"]["echo"]["dtype"] == "bfloat16"
    sent, again = (r.tensor for r in dispatcher.requests)
    assert sent == again
    assert main(["infer", "echo", "-i", file]) == 2  # a task of float32
    assert "uint16 cannot travel" in capsys.readouterr().err


def test_infer_values_are_json_even_if_not_finite(
    dispatcher: FakeDispatcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "n.npy", np.array([[1.0, np.nan, np.inf, 2.0]], np.float32))
    assert main(["infer", "echo", "-i", str(tmp_path / "n.npy"), "--json"]) == 0
    assert document(capsys)["results"]["echo"]["values"] == [[1.0, None, None, 2.0]]


def test_infer_failures(
    dispatcher: FakeDispatcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", "fail", "--random"]) == ExitCode.FAILED
    assert "BLOCK_FAILED" in capsys.readouterr().err
    assert main(["infer", "fail", "--random", "--json"]) == ExitCode.FAILED
    assert document(capsys)["error"]["code"] == "BLOCK_FAILED"
    assert main(["infer", "echo", "fail", "--random", "--json"]) == ExitCode.FAILED
    results = document(capsys)["results"]
    assert results["fail"]["error"]["code"] == "BLOCK_FAILED"
    assert results["echo"]["dims"] == [1, 4]
    assert main(["infer", "silent", "--random", "--deadline", "0.05"]) == ExitCode.FAILED
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ["echo"],
        ["echo", "--random", "--input", "x.npy"],
        ["echo", "--input", "none.npy"],
        ["echo", "--input", "x.txt"],
        ["echo", "--input", "{tmp}/pickled.npy"],
        ["echo", "--input", "{tmp}/bad.safetensors"],
        ["echo", "--input", "{tmp}/two.safetensors"],
        ["echo", "--input", "{tmp}/two.safetensors:c"],
        ["echo", "--random", "--output", "x.txt"],
        ["echo", "--random", "--output", "{tmp}/none/x.npy"],
        ["echo", "--random", "--dim", "length=3"],
        ["nonsense", "--random"],
        ["echo", "--random", "--rows", "0"],
        ["echo", "--random", "--rows", "1000000000000"],
        ["echo", "--random", "--seed", "-1"],
        ["echo", "--input", "{tmp}/empty.npy"],
        ["echo", "--input", "{tmp}/torn.npy"],
        ["echo", "--input", "{tmp}/packed.npy"],
        ["echo", "--random", "--deadline", "100"],
        ["echo", "--random", "--address", "nonsense"],
    ],
)
def test_infer_bad_input(dispatcher: FakeDispatcher, tmp_path: Path, args: list[str]) -> None:
    from safetensors.numpy import save_file

    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    (tmp_path / "empty.npy").write_bytes(b"")
    with (tmp_path / "packed.npy").open("wb") as packed:
        np.savez(packed, x=np.zeros(3))
    np.save(tmp_path / "whole.npy", np.zeros(3))
    (tmp_path / "torn.npy").write_bytes((tmp_path / "whole.npy").read_bytes().replace(b"}", b"("))
    save_file({"a": np.zeros(1), "b": np.zeros(1)}, tmp_path / "two.safetensors")
    assert main(["infer", *(a.replace("{tmp}", str(tmp_path)) for a in args)]) == 2


def test_infer_without_a_system(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/none.sock"
    assert main(["infer", "echo", "--random", "--address", address]) == ExitCode.NOT_RUNNING
