"""Programs that would do more than compute: no way of theirs into a process is open."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from blockflow.core.errors import BlockError  # noqa: E402
from blockflow.core.model import BlockInfo, Contract, TensorSpec  # noqa: E402
from blockflow.engine.archive import refuse_code  # noqa: E402
from blockflow.engine.base import EngineOptions  # noqa: E402
from blockflow.engine.exported import ExportedEngine  # noqa: E402
from blockflow.engine.program import is_known, read_program  # noqa: E402
from blockflow.engine.targets import (  # noqa: E402
    PickledProgram,
    RefusedProgram,
    UnknownProgram,
    computes,
    operator_of,
    refuse_operator,
)

MODEL = "archive/models/model.json"
TABLE = "archive/data/weights/model_weights_config.json"
SPEC = TensorSpec("float32", ("rows", 4))
INFO = BlockInfo(
    name="b",
    version="1",
    digest="0" * 64,
    format="pt2",
    contract=Contract(SPEC, SPEC),
    parameters=0,
    state_bytes=0,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x).reshape(x.shape[0] * 2, 2).reshape(x.shape[0], 4)
        return y.to(torch.float64).to(dtype=torch.float32) + torch.zeros(4, dtype=torch.float32)


@pytest.fixture(scope="module")
def records() -> Mapping[str, bytes]:
    rows = torch.export.Dim("rows", max=64)
    program = torch.export.export(Net().eval(), (torch.ones(3, 4),), dynamic_shapes=({0: rows},))
    file = io.BytesIO()
    torch.export.save(program, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(
    records: Mapping[str, bytes | str], first: Mapping[str, bytes | str] | None = None
) -> io.BytesIO:
    """``first`` lies before the others, where torch's reader looks first."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in {**(first or {}), **records}.items():
            archive.writestr(name, data)
    out.seek(0)
    return out


def described(
    records: Mapping[str, bytes], change: Callable[[Any], None], name: str = MODEL
) -> io.BytesIO:
    value = json.loads(records[name])
    change(value)
    return packed({**records, name: json.dumps(value)})


def not_loaded(file: io.BytesIO, tmp_path: Path, why: str) -> None:
    """By the reader and by torch, as the engine would."""
    path = tmp_path / "b.pt2"
    path.write_bytes(file.getvalue())
    with pytest.raises(BlockError, match=why) as e:
        ExportedEngine(INFO, EngineOptions()).load(path)
    assert e.value.code == "LOAD_FAILED"
    file.seek(0)
    with pytest.raises(RefusedProgram, match=why):
        refuse_code(file)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_an_honest_program_passes(records: Mapping[str, bytes], tmp_path: Path) -> None:
    file = packed(records)
    refuse_code(file)
    file.seek(0)
    assert torch.export.load(file).module(check_guards=False)(torch.ones(5, 4)).shape == (5, 4)
    path = tmp_path / "b.pt2"
    path.write_bytes(file.getvalue())
    engine = ExportedEngine(INFO, EngineOptions())
    engine.load(path)
    assert engine.run(torch.ones(5, 4)).shape == (5, 4)


@pytest.mark.parametrize("name", ["data/weights/MODEL_WEIGHTS_CONFIG.JSON", "Models/model.json"])
def test_a_table_under_another_case(
    records: Mapping[str, bytes], tmp_path: Path, name: str
) -> None:
    """torch's reader finds names without regard to case, and takes the first."""
    table = json.loads(records[TABLE])
    for entry in table["config"].values():
        entry.update(use_pickle=True, path_name="weight_9")
    bomb = io.BytesIO()
    torch.save(Bomb(tmp_path / "ran"), bomb, pickle_module=pickle)
    first = {f"archive/{name}": json.dumps(table), "archive/data/weights/weight_9": bomb.getvalue()}
    file = packed(records, first)
    not_loaded(file, tmp_path, "two records|no record")
    for check in (read_program, is_known):
        with pytest.raises(PickledProgram):
            check(file)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "archive/data/weights/other_weights_config.json",
        "archive/data/weights/weight_0x",
        "archive/data/weights/..\\weight_7",
        "archive/data/constants/model.pt",
        "archive/data/constants/custom_obj_0",
        "archive/data/weights/a/b",
        "/archive/extra/x",
        "archive/extra/x\u0131",
        "archive/data/aotinductor/model/x.so",
        "elsewhere/models/model.json",
    ],
)
def test_records_that_no_export_has(
    records: Mapping[str, bytes], tmp_path: Path, name: str
) -> None:
    not_loaded(packed({**records, name: b"{}"}), tmp_path, "no record|pickle")


def test_two_readers_that_disagree(records: Mapping[str, bytes]) -> None:
    """Two lists of records: torch's reader goes where the end of the archive says, Python's to what
    lies before that end, and takes all of it to be shifted."""
    plain = packed({**records, "archive/extra/a": b"x"})
    with zipfile.ZipFile(plain) as archive:
        shift = len(plain.getvalue()) - 22 - archive.start_dir
    out = io.BytesIO(bytes(shift))
    out.seek(shift)
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in {**records, "archive/extra/a": b"x"}.items():
            archive.writestr(name, data)
    data = out.getvalue()
    body, theirs, end = data[: -22 - shift], data[-22 - shift : -22], data[-22:]
    ours = bytearray(theirs.replace(b"archive/extra/a", b"archive/extra/b"))
    at = 0
    while (at := ours.find(b"PK\x01\x02", at)) >= 0:
        moved = int.from_bytes(ours[at + 42 : at + 46], "little") - shift
        ours[at + 42 : at + 46] = moved.to_bytes(4, "little")
        at += 46
    file = io.BytesIO(body + theirs + ours + end)
    assert "archive/extra/b" in zipfile.ZipFile(file).namelist()
    file.seek(0)
    assert "extra/a" in torch._C.PyTorchFileReader(file).get_all_records()
    with pytest.raises(RefusedProgram, match="two readers"):
        refuse_code(file)


def test_compressed_records(records: Mapping[str, bytes], tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    not_loaded(out, tmp_path, "compressed")


def test_archives_without_what_a_program_has(records: Mapping[str, bytes]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        refuse_code(packed({}))
    bare = dict(records)
    del bare[TABLE]
    assert not is_known(packed(bare))
    for table in (b"[]", b"{}", b'{"config": {"a": 1}}'):
        for check in (is_known, refuse_code):
            with pytest.raises(ValueError, match="no table"):
                check(packed({**records, TABLE: table}))


S = "Symbol('s31', positive=True, integer=True)"


def test_a_formula_is_never_evaluated(records: Mapping[str, bytes], tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    def change(value: Any) -> None:
        graph = value["graph_module"]["graph"]
        dim = next(
            s["as_expr"]
            for v in graph["tensor_values"].values()
            for s in v["sizes"]
            if "as_expr" in s
        )
        dim["expr_str"] = f"(__import__('pathlib').Path('{mark}').touch(), {S})[1]"
        graph["nodes"][0]["target"] = "torch.ops.quantized.add.default"  # unknown to the reader

    not_loaded(described(records, change), tmp_path, "more than arithmetic")
    assert not mark.exists()


def call(target: str, *inputs: tuple[str, Any, int]) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        node = value["graph_module"]["graph"]["nodes"][0]
        named = [{"name": n, "arg": arg, "kind": kind} for n, arg, kind in inputs]
        node.update(target=target, inputs=named)

    return change


def test_no_operator_opens_files(records: Mapping[str, bytes], tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"\0" * 64)
    name, size = {"as_string": str(victim)}, {"as_int": 4}
    change = call(
        "torch.ops.aten.from_file.default",
        ("filename", name, 1),
        ("shared", {"as_bool": True}, 1),
        ("size", size, 1),
    )
    not_loaded(described(records, change), tmp_path, "only compute")
    with pytest.raises(RefusedProgram):
        is_known(described(records, change))


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.ops.aten.from_file.out",
        "torch.ops.aten.save.default",
        "torch.ops.aten._print.default",
        "torch.ops.aten.set_.source_Storage",
        "torch.ops.aten.no_such.default",
        "torch.ops.aten.add",
        "torch.ops.load_library",
        "torch.ops.debugprims.load_tensor.default",
        "torch.ops.profiler._record_function_enter.default",
        "torch.ops.higher_order.flat_apply",
        "torch.ops.higher_order.cond.default",
        "torch.hub.load",
        "_operator.attrgetter",
        "_operator.call",
        "math.os",
        "#ext:handler",
        "",
    ],
)
def test_operators_that_do_more(target: str) -> None:
    with pytest.raises(RefusedProgram):
        refuse_operator(target)


def test_operators_that_compute() -> None:
    for name in ("aten.add.Tensor", "aten.linalg_norm.ord_str", "aten.conv2d.padding"):
        refuse_operator(f"torch.ops.{name}")
    for name in ("torch.sym_max", "_operator.floordiv", "torch.ops.higher_order.cond"):
        refuse_operator(name)
    refused = [name for name in operators() if not computes(overload(name))]
    assert "aten::from_file" in refused
    assert len(refused) < 40, "the rule by schemas refuses what exports may hold"


def operators() -> list[str]:
    return [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]


def overload(full: str) -> Any:
    name, _, kind = full.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, name), kind or "default")


def test_names_of_arguments_are_not_written_into_code(
    records: Mapping[str, bytes], tmp_path: Path
) -> None:
    """fx writes keywords into the Python of a graph as they are."""
    mark = tmp_path / "ran"

    def change(value: Any) -> None:
        for node in value["graph_module"]["graph"]["nodes"]:
            for given in node["inputs"]:
                if given["kind"] == 2:
                    given["name"] = f"x=open({str(mark)!r}, 'w'), {given['name']}"
                    return
        pytest.fail("no keyword in the program")

    file = described(records, change)
    not_loaded(file, tmp_path, "no argument|no name")
    assert not mark.exists()


def test_what_neither_knows_is_unknown() -> None:
    with pytest.raises(UnknownProgram):
        operator_of("torch.ops.quantized.add.default")
