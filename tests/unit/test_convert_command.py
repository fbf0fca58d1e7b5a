"""``blockflow convert`` of several blocks: what was made is told, whatever comes after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.exc import CppCompileError

from blockflow.cli.main import main
from blockflow.core.engines import UNLOADED
from blockflow.core.errors import BlockFlowError, ExportError
from blockflow.engine import workshop
from blockflow.repository.convert import ConvertReport, convert_block
from blockflow.repository.repository import BlockRepository
from blockflow.repository.verdict import none_fit
from tests.unit.test_convert import Bench
from tests.unit.test_repository_variants import choice, save_block


@pytest.fixture
def blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Blocks ``a`` and ``b``, of which ``b`` cannot be converted."""
    for name in ("a", "b"):
        save_block(BlockRepository(tmp_path), name)

    def convert_block(_store: Any, name: str, kind: str, *_: Any, **__: Any) -> ConvertReport:
        if name == "b":
            raise ExportError("EXPORT_FAILED", "no such operator", where=name)
        errors, refused = {"one": 0.0}, {"two": "it differs"}
        return ConvertReport(name, kind, "0" * 64, 1, errors, refused, 0.1, (), "", "")

    monkeypatch.setattr("blockflow.repository.convert.convert_block", convert_block)
    return str(tmp_path)


def test_what_was_made_before_a_failure_is_told(
    blocks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "a", "b", "--to", "onnx", "-r", blocks]) == 2
    told = capsys.readouterr()
    assert "one: 0.0e+00" in told.out and "a onnx: not for two: it differs" in told.err
    assert "no such operator" in told.err
    assert main(["convert", "a", "b", "--to", "onnx", "-r", blocks, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [v["block"] for v in document["variants"]] == ["a"]
    assert document["error"]["code"] == "EXPORT_FAILED"


def test_a_block_that_is_not_there_is_told_before_anything_is_made(
    blocks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "a", "c", "--to", "onnx", "-r", blocks, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["variants"] == [] and document["error"]["code"] == "UNKNOWN_BLOCK"


def test_that_a_choice_is_forgotten_is_told_with_the_command_that_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds for the same file, and for one that is as exact as was asked for."""
    save_block(store := BlockRepository(tmp_path), "a")
    bench = Bench()
    assert convert_block(store, "a", "onnx", bench).warning == ""
    store.save_choice(store.info("a"), "machine", choice())
    assert convert_block(store, "a", "onnx", bench).warning == ""
    assert "machine" in store.info("a").choices
    monkeypatch.setattr(bench, "make", lambda *given: given[-1].write_bytes(b"otherwise"))
    assert convert_block(store, "a", "onnx", bench).warning == ""
    assert "machine" in store.info("a").choices
    bench = Bench(openvino=lambda x: x * 2.1)
    monkeypatch.setattr(bench, "make", lambda *given: given[-1].write_bytes(b"less exact"))
    warning = convert_block(store, "a", "onnx", bench, tolerance=0.1).warning
    assert "forgotten" in warning and "blockflow profile a --choose" in warning
    assert not store.info("a").choices


@pytest.mark.parametrize("why", [f"{UNLOADED}no such type", "fails on [1, 4]: no such type"])
def test_where_no_tolerance_helps_the_block_still_runs_as_it_is(why: str) -> None:
    assert "engine 'exported'" in none_fit("b", "onnx", {"openvino": why}).hint


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("x.cpp:1: fatal error: Python.h: No such file or directory", "EXPORT_FAILED"),
        ("error writing to x.s: No space left on device", "NO_SPACE"),
    ],
)
def test_a_compilers_own_words_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: str
) -> None:
    """Not the thousand characters of its command, which come first."""

    def fails(*_: object) -> None:
        raise CppCompileError(["g++", "x.cpp", *["-Doption"] * 100], said)

    monkeypatch.setattr(workshop, "_write_package", fails)
    save_block(repository := BlockRepository(tmp_path), "a")
    with pytest.raises(BlockFlowError) as e:
        workshop.EngineWorkshop().make("aoti", repository.info("a"), tmp_path, (), tmp_path / "x")
    assert e.value.code == code and e.value.where == "a"
    assert said in e.value.message and "-Doption" not in e.value.message
