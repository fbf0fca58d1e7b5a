"""Each option reaches the setting of its name: every one has a value of its own here."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from blockflow.__main__ import main as script
from blockflow.bench.mlperf.presets import PRESETS
from blockflow.bench.mlperf.settings import Mode, Scenario
from blockflow.bench.mlperf.validation import Check
from blockflow.bench.simulation.sources import Costs, TaskChoice
from blockflow.cli.main import COMMANDS, load, main
from blockflow.core.model import Padding, TensorSpec
from blockflow.monitor.doctor.gather import HASHED_BYTES
from blockflow.repository.zoo.catalog import ZOO


class Seen(BaseException):
    """What a command was about to begin with."""


class Given:
    """Stands for what does the work: how it is called is what is looked at."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        raise Seen(args, kw)


def given(*words: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    with pytest.raises(Seen) as seen:
        main([str(word) for word in words])
    args, kw = seen.value.args
    return args, kw


def test_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("blockflow.control.settings.ControlSettings", Given)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words: list[object] = ["--repository", "r", "--state-dir", "s", "--host", "h"]
    words += ["--client-host", "c", "--port", 1, "--client-port", 2, "--keys", "k"]
    words += ["--token-file", "t", "--name", "n", "--name", "m", "--rest-cert", "e"]
    words += ["--rest-key", "y", "--rest-plain", "--max-inflight", 3, "--fixed-limit"]
    assert given("up", *words)[1] == {
        "repository": Path("r"),
        "state_dir": Path("s"),
        "host": "h",
        "client_host": "c",
        "rest_port": 1,
        "client_port": 2,
        "keys": Path("k"),
        "token_file": Path("t"),
        "names": ("n", "m"),
        "rest_cert": Path("e"),
        "rest_key": Path("y"),
        "rest_plain": True,
        "max_inflight": 3,
        "max_inflight_per_client": 3,
        "adaptive_limit": False,
    }
    plain = given("up")[1]
    assert plain["state_dir"] == tmp_path / "blockflow"
    assert plain["adaptive_limit"] and not plain["rest_plain"] and plain["names"] == ()


def test_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockflow.cli.simulate.plain_system", lambda *a, **kw: (*a[1:], kw))
    monkeypatch.setattr("blockflow.cli.simulate.plan_experiment", Given)
    words: list[object] = ["--example", "--task", "t@2=a,b", "--share", "t:weight=3", "--apart"]
    words += ["--replicas", 2, "--cores", 3, "--threads", 4, "--lanes", 5, "--slots", 6]
    words += ["--credits", 7, "--max-rows", 8, "--hop-ms", 9, "--turn-ms", 10, "--load", "0.1"]
    words += ["--rate", "12", "--arrivals", "burst", "--rows", "13", "--lengths", "14"]
    words += ["--duration", 15, "--warmup", 16, "--deadline-ms", 17, "--bound-ms", 18]
    words += ["--seeds", 19, "--first-seed", 20, "--policy", "none", "--exact", "--check"]
    (system, order), _ = given("simulate", *words)
    tasks, shares, costs, apart = system
    assert tasks == [TaskChoice("t", ("a", "b"), 2.0)]
    assert shares["t"].weight == 3 and apart == {"apart": True, "known": {}}
    assert costs == Costs(
        cores=3,
        hop_ms=9.0,
        turn_ms=10.0,
        credits=7,
        slots=6,
        threads=4,
        replicas=2,
        max_rows=8,
        deadline_ms=17.0,
        lanes=5,
    )
    assert (order.policies, order.from_topology) == (["none"], False)
    assert (order.loads, order.rates, order.arrivals) == ("0.1", "12", "burst")
    assert (order.rows, order.lengths) == ("13", "14")
    assert (order.duration_s, order.warmup_s, order.bound_ms) == (15.0, 16.0, 18.0)
    assert (order.seeds, order.first_seed, order.noisy, order.check) == (19, 20, False, True)


def test_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockflow.cli.demo.Demo", Given)
    words: list[object] = ["--keep", "--reuse", "--topology", "t", "--repository", "r"]
    words += ["--results", "f", "--epochs", 2, "--images", 3, "--requests", 4, "--seed", 5]
    (settings, *_), _ = given("demo", *words, "--rest-port", 6, "--client-port", 7)
    assert (settings.keep, settings.reuse) == (True, True)
    paths = (settings.topology, settings.repository, settings.results)
    assert paths == (Path("t"), Path("r"), Path("f"))
    assert (settings.epochs, settings.images, settings.requests, settings.seed) == (2, 3, 4, 5)
    assert (settings.rest_port, settings.client_port) == (6, 7)
    (settings, *_), _ = given("demo", "--keep")
    assert not settings.reuse


def test_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in ("check_loadgen", "new_page"):
        monkeypatch.setattr(f"blockflow.cli.bench.{needed}", lambda *_: None)
    monkeypatch.setattr("blockflow.cli.bench.Session", Given)
    preset = next(iter(PRESETS))
    words: list[object] = ["--task", "a=2,b=3", "--scenario", "server", "--scenario", "offline"]
    words += ["--mode", "accuracy", "--mode", "accuracy", "--validate", "all"]
    words += ["--preset", f"a={preset}", "--target-latency-ms", "a=5", "--percentile", "b=97"]
    words += ["--confidence", 90, "--tolerance", 0.2, "--rate", 6, "--precision", 0.07]
    words += ["--search-runs", 8, "--confirmations", 9, "--server-runs", 10, "--duration", 11]
    words += ["--queries", 12, "--samples-per-query", 13, "--rows", 14, "--in-flight", 15]
    words += ["--data", "digits:1", "--preprocess", "b=m:f", "--deadline", 16, "--seed", 17]
    words += ["--out", "o", "--url", "http://h:1", "--address", "tcp://h:2", "--client-keys", "k"]
    (plan, _, rest, _), _ = given("bench", *words)
    assert rest.url == "http://h:1"
    assert (plan.address, plan.client_keys, plan.out) == ("tcp://h:2", "k", Path("o"))
    assert plan.weights == {"a": 2, "b": 3}
    assert (plan.scenarios, plan.modes) == ([Scenario.SERVER, Scenario.OFFLINE], [Mode.ACCURACY])
    assert (plan.checks, plan.short) == (list(Check), False)
    assert plan.presets == {"a": PRESETS[preset]}
    assert (plan.latency_ms, plan.percentile) == ({"a": 5.0}, {"b": 97.0})
    assert (plan.confidence, plan.tolerance, plan.precision) == (0.9, 0.2, 0.07)
    assert (plan.rate, plan.search_runs, plan.confirmations, plan.server_runs) == (6.0, 8, 9, 10)
    assert (plan.duration_s, plan.queries, plan.samples_per_query) == (11.0, 12, 13)
    assert (plan.rows, plan.in_flight, plan.data) == (14, 15, "digits:1")
    assert (plan.preprocess, plan.deadline_s, plan.seed) == ({"b": "m:f"}, 16.0, 17)


def test_a_short_bench_has_counts_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in ("check_loadgen", "new_page"):
        monkeypatch.setattr(f"blockflow.cli.bench.{needed}", lambda *_: None)
    monkeypatch.setattr("blockflow.cli.bench.Session", Given)
    (plan, *_), _ = given("bench", "--task", "a", "--short")
    assert plan.short
    assert main(["bench", "--task", "a", "--short", "--confidence", "90"]) == 2
    assert "--confidence has no effect with --short" in capsys.readouterr().err


def test_a_bench_of_another_address_asks_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default address would be some other system's."""
    for needed in ("check_loadgen", "new_page"):
        monkeypatch.setattr(f"blockflow.cli.bench.{needed}", lambda *_: None)
    monkeypatch.setattr("blockflow.cli.bench.Session", Given)
    (_, _, rest, _), _ = given("bench", "--task", "a", "--address", "tcp://h:2")
    assert rest is None
    (_, _, rest, _), _ = given("bench", "--task", "a")
    assert rest.url == "http://127.0.0.1:5780"


def test_thesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockflow.cli.thesis.new_page", lambda *_: None)
    monkeypatch.setattr("blockflow.cli.thesis.Session", Given)
    words = ["--model", "resnet18", "--engine", "exported", "--device", "cpu"]
    words += ["--constants", "thesis", "--out", "o"]
    (_, call, folder, _), _ = given("bench", "thesis", *words)
    settings = call.settings
    assert (settings.quick, settings.model, settings.engine) == (False, "resnet18", "exported")
    assert (settings.device, settings.constants, folder) == ("cpu", "thesis", Path("o"))
    (_, call, folder, _), _ = given("bench", "thesis", "--quick", "--device", "cpu")
    assert (call.settings.quick, call.settings.model) == (True, "resnet18")
    assert (call.settings.constants, folder) == ("machine", Path("results/thesis-quick"))


def test_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockflow.cli.profile._measure", Given)
    words: list[object] = ["-r", "r", "--engines", "exported,compiled", "--precisions", "bf16"]
    words += ["--option", "k=1", "--threads", "1-3", "--rows", "4,5", "--lengths", "6"]
    words += ["--confidence", 0.07, "--seconds", 8, "--again", "--tolerance", 0.09]
    (store, subjects, wish, json_), _ = given("profile", "a", "b", "a", *words, "--json")
    assert (store.root, subjects, json_) == (Path("r"), [["a"], ["b"]], True)
    assert (wish.engines, wish.precisions) == (["exported", "compiled"], ["bf16"])
    assert (wish.options, wish.threads, wish.rows) == ({"k": 1}, [1, 2, 3], [4, 5])
    assert (wish.lengths, wish.effort.confidence, wish.effort.seconds) == ([6], 0.07, 8.0)
    assert (wish.again, wish.choose, wish.tolerance) == (True, False, 0.09)
    for more, engines, precisions in (
        ([], ["auto"], ["all"]),
        (["--choose"], ["all"], ["all"]),
        (["--engines", "all"], ["all"], ["all"]),
        (["--engines", "exported"], ["exported"], ["fp32"]),
        (["--engines", "exported", "--choose"], ["exported"], ["all"]),
    ):
        (_, subjects, wish, _), _ = given("profile", "--chain", "a, b", *more)
        assert subjects == [["a", "b"]] and wish.choose is ("--choose" in more)
        assert (wish.engines, wish.precisions) == (engines, precisions)


def test_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockflow.cli.export._export", Given)
    words: list[object] = ["m:f", "-r", "r", "--name", "a, b", "--prefix", "p", "--split", "s,t"]
    words += ["--parts", 2, "--block", "x=l1", "--format", "torchscript-traced", "--weights", "w"]
    words += ["--seed", 3, "--arg", "k=[1]", "--input", "int64[rows,n]", "--range", "n=1..4"]
    words += ["--int-below", 5, "--padding", "n=6", "--version", "7", "--force"]
    assert given("export", *words)[1] == {
        "model": "m:f",
        "repository": Path("r"),
        "names": ["a", "b"],
        "prefix": "p",
        "split": "s,t",
        "parts": 2,
        "blocks": {"x": "l1"},
        "format": "torchscript-traced",
        "weights": Path("w"),
        "seed": 3,
        "arguments": {"k": [1]},
        "spec": TensorSpec("int64", ("rows", "n"), {"n": (1, 4)}),
        "padding": "n=6",
        "int_below": 5,
        "version": "7",
        "replace_stored": True,
    }
    assert given("export", "m:f")[1]["int_below"] is None


def test_the_padding_of_an_export() -> None:
    from blockflow.cli.export import _padding

    assert _padding("n=6") == Padding("n", 6) and _padding("n") == Padding("n", 0)


def test_convert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockflow.cli.convert.convert_all", Given)
    words: list[object] = ["a", "b", "--to", "onnx,aoti", "-r", "r", "--calibrate", "c"]
    assert given("convert", *words, "--tolerance", 0.1) == (
        (Path("r"), ["a", "b"], ["onnx", "aoti"]),
        {"calibrate": Path("c"), "tolerance": 0.1},
    )


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockflow.monitor.doctor.gather.gather", Given)
    words: list[object] = ["-r", "r", "--state-dir", "s", "--keys", "k", "--port", 1]
    expected = {
        "state_dir": Path("s"),
        "keys": Path("k"),
        "rest_port": 1,
        "client_port": 2,
        "hash_bytes": HASHED_BYTES,
    }
    assert given("doctor", *words, "--client-port", 2) == ((Path("r"),), expected)
    assert given("doctor", "--all")[1]["hash_bytes"] > 1 << 60


@pytest.mark.parametrize(
    ("words", "meant"), [(["aply"], "apply"), (["bench", "tesis"], "thesis")], ids=["top", "group"]
)
def test_a_misspelt_command_is_guessed(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"Did you mean '{meant}'?" in capsys.readouterr().err


def test_the_zoo_is_listed_with_names_and_inputs_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["export", "--list"]) == 0
    listed = capsys.readouterr().out
    for name, model in ZOO.items():
        assert f" {name} " in listed
        assert str(model.input).replace(" ", "") in listed


def test_the_repository_is_r_for_every_command() -> None:
    options = [p.opts for name in COMMANDS for p in load(name).params if p.name == "repository"]
    assert len(options) >= 7
    assert all("-r" in names for names in options)


def test_a_command_where_the_client_alone_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "blockflow.cli.main")
    monkeypatch.setitem(sys.modules, "typer", None)  # its import raises, as where it is missing
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own stays
    assert script() == 2
    assert "the package 'typer' is not installed" in capsys.readouterr().err
