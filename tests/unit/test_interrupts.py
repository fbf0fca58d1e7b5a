"""Ctrl-C, SIGTERM and SIGHUP: the first ends a run in order, later ones change nothing, and every
benchmark and command that starts something listens."""

from __future__ import annotations

import argparse
import ast
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from blockflow.bench.interrupts import INTERRUPTED, hold, interruptible, orderly, unbroken
from blockflow.cli import demo, lazy, thesis
from blockflow.cli.exits import ExitCode
from blockflow.cli.main import main as cli
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BENCH = Path(__file__).resolve().parents[2] / "blockflow" / "bench"
START_NOTHING = {"plots", "docs", "mlperf.figures", "mlperf.accuracy"}
"""They read files, and write or print, at once."""


@cache
def benchmarks() -> list[str]:
    """Modules that a person runs, below ``blockflow.bench``: their ``main`` takes arguments."""
    found = []
    for path in sorted(BENCH.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "parse_args(" not in text and "parse_rounds(" not in text:
            continue
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "main" and node.args.args
            for node in ast.parse(text).body
        ):
            found.append(".".join(path.relative_to(BENCH).with_suffix("").parts))
    return [name for name in found if name not in START_NOTHING]


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """What they mean outside of a run; one that nobody takes must not end the tests."""

    def unheard(number: int, frame: object) -> None:
        raise AssertionError("it would have ended on the spot")

    before = (
        signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.signal(signal.SIGTERM, unheard),
        signal.signal(signal.SIGHUP, unheard),
    )
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


def send(number: signal.Signals) -> None:
    """To this very thread, whose handler runs before this returns: ``kill`` may choose another
    thread, whose turn comes when the test is over."""
    signal.raise_signal(number)


def sent(*_: Any, **__: Any) -> Any:
    """In the place of what a run does."""
    send(signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_interrupts_and_later_ones_change_nothing(
    number: signal.Signals,
) -> None:
    before = handlers()
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            send(number)
        send(number)
    assert handlers() == before
    # Nor does the first, once everything is measured.
    with interruptible():
        hold()
        send(number)
    assert handlers() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_a_shell_or_nohup_has_ignored_stays_ignored(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_IGN)
    with interruptible():
        send(number)


def test_an_import_is_not_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """In native code an exception may end the process."""
    done = []

    def importing(name: str) -> Any:
        send(signal.SIGTERM)
        send(signal.SIGINT)
        done.append(name)
        return import_module(name)

    monkeypatch.setattr(lazy, "import_module", importing)
    with pytest.raises(KeyboardInterrupt), interruptible():
        lazy.load({"keys": ("keys", "keys", "")}, "keys")
    assert done == ["blockflow.cli.keys"]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with unbroken():
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_what_is_started_while_a_run_ends_can_be_ended_too() -> None:
    """An ignored signal stays ignored in a new program; one with a handler does not."""
    with interruptible():
        hold()
        assert signal.SIG_IGN not in handlers()


@pytest.mark.parametrize("number", SIGNALS)
def test_an_orderly_main_leaves_its_contexts_and_says_so(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    left = []

    @orderly
    def main(argv: list[str]) -> int:
        try:
            send(number)
        finally:
            send(number)  # impatience does not keep it from ending in order
            left.append(argv)
        return 0

    assert main(["x"]) == INTERRUPTED == ExitCode.INTERRUPTED
    assert left == [["x"]]
    assert capsys.readouterr().err == "interrupted; what was started was stopped\n"


def test_an_orderly_main_that_is_left_alone_returns_its_status() -> None:
    @orderly
    def main(arguments: list[str]) -> int:
        return 7 + len(arguments)

    before = handlers()
    assert main([]) == 7
    assert handlers() == before


def test_the_benchmarks_are_found() -> None:
    some = {"hops", "tasks", "pipeline", "gpu", "chaos.run", "fuzz.run", "faultsim.run"}
    assert some < {*benchmarks()}
    assert START_NOTHING.isdisjoint(benchmarks())


@pytest.mark.parametrize("name", benchmarks())
def test_every_benchmark_ends_in_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main: Callable[[list[str]], int] = import_module(f"blockflow.bench.{name}").main
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", sent)
    assert main(["any"]) == INTERRUPTED


def test_the_demo_ends_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.Demo, "run", sent)
    assert cli(["demo"]) == INTERRUPTED
    assert "Interrupted. The system was stopped." in capsys.readouterr().out


def test_the_thesiss_experiments_end_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(thesis.Session, "run", sent)
    arguments = ["--only", "offline", "--quick", "--device", "cpu", "--out", str(tmp_path)]
    assert cli(["bench", "thesis", *arguments]) == INTERRUPTED
    assert "what was found is kept" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("export._export", ["export", "resnet50"]),
        ("convert.convert_all", ["convert", "one", "--to", "onnx"]),
        ("look.RestClient.get", ["status"]),
    ],
)
def test_every_command_ends_in_order(
    place: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = handlers()
    monkeypatch.setattr(f"blockflow.cli.{place}", sent)
    assert cli(arguments) == INTERRUPTED
    assert capsys.readouterr().err == "blockflow: interrupted\n"
    assert handlers() == before


@pytest.mark.parametrize("error", [ImportError("initialization failed"), typer.Exit(2)])
def test_who_makes_another_error_of_it_was_interrupted_all_the_same(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_all(*_: Any, **__: Any) -> Any:
        with suppress(KeyboardInterrupt):
            send(signal.SIGTERM)
        raise error

    monkeypatch.setattr("blockflow.cli.convert.convert_all", convert_all)
    assert cli(["convert", "one", "--to", "onnx"]) == INTERRUPTED


def test_the_demo_is_interrupted_whatever_its_imports_make_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: demo.Demo) -> Any:
        with suppress(KeyboardInterrupt):
            send(signal.SIGTERM)
        raise ImportError("initialization failed")

    monkeypatch.setattr(demo.Demo, "run", run)
    assert cli(["demo"]) == INTERRUPTED
    out, err = capsys.readouterr()
    assert "Interrupted. The system was stopped." in out and not err


def test_a_benchmark_is_interrupted_whatever_its_imports_make_of_it() -> None:
    @orderly
    def main(argv: list[str]) -> int:
        with suppress(KeyboardInterrupt):
            send(signal.SIGTERM)
        raise ImportError("initialization failed")

    assert main([]) == INTERRUPTED


def test_who_ends_well_in_spite_of_it_has_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert_all(*_: Any, **__: Any) -> list[Any]:
        with suppress(KeyboardInterrupt):
            send(signal.SIGTERM)
        return []

    monkeypatch.setattr("blockflow.cli.convert.convert_all", convert_all)
    assert cli(["convert", "one", "--to", "onnx"]) == 0


def test_a_command_may_run_in_any_thread(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no handlers can be set."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cli, ["--version"]).result(60) == 0


def test_profiling_ends_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_echo(BlockRepository(tmp_path), "one", TensorSpec("float32", ("rows", 4)))
    monkeypatch.setattr("blockflow.bench.profiling.run.measure", sent)
    assert cli(["profile", "one", "--repository", str(tmp_path)]) == INTERRUPTED
    assert "the same command goes on from there" in capsys.readouterr().out
