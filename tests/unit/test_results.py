"""Figures: percentiles, the JSON Lines file and the machine's fingerprint."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from blockflow.bench.results import (
    Figure,
    ResultFile,
    figure_table,
    fingerprint,
    latency_figure,
    make_command,
)

REQUIRED = {"name", "mode", "batch", "p50_ms", "p90_ms", "value", "unit", "n", "machine"}


def test_a_latency_figure_tells_its_median_and_tail() -> None:
    figure = latency_figure("latency", "digit", 1, [1.0, 2.0, 3.0, 10.0])
    assert (figure.p50_ms, figure.p90_ms, figure.p99_ms, figure.value) == (2.0, 10.0, 10.0, 2.0)
    assert figure.n == 4


def test_a_run_replaces_the_file_of_the_one_before(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "deep" / "results.jsonl", "demo")
    figures = [
        Figure("accuracy", "digit", None, None, None, 99.2, "%", 360),
        latency_figure("latency", "digit", 1, [1.0]),
    ]
    assert file.write(figures) == 2
    assert file.write(figures[:1]) == 1
    (line,) = file.read()
    assert set(line) >= REQUIRED
    assert line["benchmark"] == "demo"
    assert line["value"] == 99.2
    assert "p99_ms" not in line
    assert [p.name for p in file.path.parent.iterdir()] == ["results.jsonl"]


def test_a_full_disk_leaves_the_file_of_before_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ResultFile(tmp_path / "results.jsonl", "demo")
    figures = [latency_figure("latency", "digit", 1, [1.0])]
    file.write(figures)
    before = file.path.read_bytes()

    def full(path: Path, text: str, encoding: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        file.write([*figures, *figures])
    assert file.path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["results.jsonl"]


def test_the_fingerprint_names_machine_and_versions() -> None:
    facts = fingerprint()
    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert facts["torch"]
    json.dumps(facts)


def test_the_table_shows_every_figure() -> None:
    out = io.StringIO()
    figures = [
        latency_figure("latency", "zeromq", 8, [1.5]),
        Figure("a", "b", None, None, None, 2, "x", 1),
    ]
    Console(file=out, width=100).print(figure_table("bench", figures))
    assert "zeromq" in out.getvalue()
    assert "1.500" in out.getvalue()


def test_the_command_is_one_that_can_be_typed() -> None:
    assert make_command("bench", []) == "make bench"
    assert make_command("bench", ["--rounds", "3"]) == "make bench ARGS='--rounds 3'"
