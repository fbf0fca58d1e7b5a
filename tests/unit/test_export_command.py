"""``blockflow export``: options, tables and documents, exit statuses."""

import json
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from blockflow.cli.main import main
from blockflow.engine import exported
from blockflow.repository.repository import BlockRepository
from blockflow.repository.zoo.catalog import ZOO

MODEL = """
from torch import nn

def make(width=4):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(inplace=True), nn.Linear(width, 2))
"""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import typer

    from blockflow.cli.export import export

    (tmp_path / "my_own_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    app = typer.Typer()
    app.command("export")(export)
    return lambda *args: CliRunner().invoke(app, list(args))


def test_the_command_exports_a_model_of_ones_own(cli, tmp_path: Path) -> None:
    args = ("my_own_model:make", "--input", "float32[rows,4]", "--arg", "width=8",
            "--split", "1", "--json")  # fmt: skip
    result = cli(*args)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["paths"] == [["make-1", "make-2"]]
    assert BlockRepository(tmp_path / "blocks").names() == ["make-1", "make-2"]
    refused = cli(*args)
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["error"]["code"] == "VERSION_EXISTS"
    assert cli(*args, "--version", "2").exit_code == 0
    assert BlockRepository(tmp_path / "blocks").versions("make-1") == ["2", "1"]
    table = cli(*args[:-1], "--format", "torchscript-traced", "--force")
    assert table.exit_code == 0
    assert "make-1 -> make-2" in table.stdout and "deprecated" in table.stdout


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        (lambda module: nn.Sequential(module, nn.Softplus()), "differs from the block by"),
        (lambda module: nn.Linear(7, 7), "fails on [1, 4]"),
    ],
)
def test_the_engine_that_will_run_a_block_is_asked(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt, says: str
) -> None:
    """The blocks equal the model by torch's own loader; a worker has another."""
    good = exported.lean
    monkeypatch.setattr(exported, "lean", lambda module: spoilt(good(module)))
    result = cli("my_own_model:make", "--input", "float32[rows,4]", "--name", "m")
    assert result.exit_code == 2
    assert "EXPORT_MISMATCH" in result.output and says in " ".join(result.output.split())
    assert BlockRepository(tmp_path / "blocks").names() == []


def test_the_command_exports_a_zoo_tree(cli, tmp_path: Path) -> None:
    result = cli("digits-multi", "-r", "here", "--format", "torchscript-traced")
    assert result.exit_code == 0, result.output
    assert "trunk1 -> trunk2 -> head_digit" in result.stdout
    assert "head_digit" in BlockRepository(tmp_path / "here").names()


@pytest.mark.parametrize(
    ("args", "code"),
    [
        ((), "EXPORT_FAILED"),
        (("resnet51",), "FACTORY_FAILED"),
        (("my_own_model:make",), "EXPORT_FAILED"),
        (("my_own_model:make", "--input", "float32[4]"), "EXPORT_FAILED"),
        (("my_own_model:make", "--range", "a=1..2"), "EXPORT_FAILED"),
        (("my_own_model:make", "--input", "float32[rows,4]", "--arg", "x"), "EXPORT_FAILED"),
        (("my_own_model:make", "--input", "float32[rows,4]", "--arg", "x=1"), "FACTORY_FAILED"),
        (("my_own_model:make", "--input", "float32[rows,4]", "--split", "default"),
         "EXPORT_FAILED"),
        (("my_own_model:make", "--input", "float32[rows,4]", "--split", "9"), "NOT_SPLITTABLE"),
        (("my_own_model:make", "--input", "float32[rows,4]", "--name", "../x"), "EXPORT_FAILED"),
        (("my_own_model:make", "--input", "float32[rows,4]", "--weights", "none.pt"),
         "WEIGHTS_INVALID"),
        (("my_own_model:make", "--input", "float32[rows,4]", "--block", "a=0", "--parts", "2"),
         "EXPORT_FAILED"),
    ],
)  # fmt: skip
def test_the_command_says_what_is_wrong(cli, args: tuple, code: str) -> None:
    result = cli(*args)
    assert result.exit_code == 2
    assert code in result.stderr
    assert not result.stdout


def test_the_command_lists_the_zoo(cli) -> None:
    assert "resnet152" in cli("--list").stdout
    assert set(json.loads(cli("--list", "--json").stdout)) == set(ZOO)


def test_what_the_users_code_prints_is_not_in_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_loud_model.py").write_text(
        "import subprocess\n"
        "from torch import nn\n\n"
        "class Loud(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(4, 4)\n"
        "        print('loading my weights')\n"
        "        subprocess.run(['echo', 'from a program'], check=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    status = main(["export", "my_loud_model:Loud", "--input", "float32[rows,4]", "--json"])
    printed = capfd.readouterr()
    assert status == 0, printed.err
    assert json.loads(printed.out)["paths"] == [["Loud"]]
    assert "loading my weights" in printed.err and "from a program" in printed.err
