"""Reading exported programs: the same graph as torch's own loader, and never a pickle."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._export.serde import schema, serialize  # noqa: E402

from blockflow.engine import program  # noqa: E402
from blockflow.engine.archive import refuse_code  # noqa: E402
from blockflow.engine.lean import lean  # noqa: E402
from blockflow.engine.program import is_known, read_program  # noqa: E402
from blockflow.engine.targets import PickledProgram, UnknownProgram  # noqa: E402


class Odd(nn.Module):
    """Everything that an argument or an output can be: dims, lists, several results, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.tied = self.weight
        self.register_buffer("kept", torch.randn(6).to(torch.float64))
        self.register_buffer("transient", torch.arange(6.0), persistent=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = x.chunk(3, dim=1)
        top, _ = torch.topk(x, 2, dim=-1)
        y = torch.cat([a, b, c], dim=1) @ self.tied.t() + self.weight.sum() + self.transient
        y = self.norm(y).to(torch.float64) + self.kept * x.shape[0]
        y = y.reshape(x.shape[0] * 2, 3).reshape(x.shape[0], 6)
        mask = torch.arange(x.shape[0]).unsqueeze(1) >= 1
        y = torch.where(mask, y, torch.tensor(2.5, dtype=torch.float64))
        index = torch.tensor([5, 4, 3, 2, 1, 0])
        return (y[:, index] + torch.zeros_like(y)).to(torch.float32) + top.sum(1, keepdim=True)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )


def saved(net: nn.Module, x: Tensor) -> io.BytesIO:
    rows = torch.export.Dim("rows", max=64)
    exported = torch.export.export(net.eval(), (x,), dynamic_shapes=({0: rows},))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    return file


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("make", "dims"), [(Odd, (6,)), (convolutions, (3, 8, 8)), (attention, (5, 8))]
)
def test_same_as_torch(make: Callable[[], nn.Module], dims: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    file = saved(make(), torch.randn(3, *dims))
    assert is_known(file)
    with torch.no_grad():
        read = read_program(file)
        file.seek(0)
        theirs = torch.export.load(file).module(check_guards=False)
        for rows in (1, 3, 8):
            x = torch.randn(rows, *dims)
            # not bit by bit: a linear layer picks its way by the weights' requires_grad, too
            torch.testing.assert_close(read(x)[0], theirs(x))
            torch.testing.assert_close(lean(read)(x), lean(theirs)(x))


class Endless(nn.Module):
    """Constants that are no finite numbers, as a mask has them."""

    def forward(self, x: Tensor) -> Tensor:
        later = torch.full((6, 6), -torch.inf).triu(1)
        score = (x.unsqueeze(1) + later).masked_fill(x.unsqueeze(1) > 2, -torch.inf).softmax(-1)
        known = torch.where(x < 0, torch.nan, x).nansum(1, keepdim=True)
        return torch.cat([score.nan_to_num().sum(1), known, x.clamp(0.0, torch.inf)], dim=1)


def test_numbers_that_are_not_finite() -> None:
    torch.manual_seed(0)
    net, x = Endless(), torch.randn(3, 6)
    read = lean(read_program(saved(net, x)))
    torch.testing.assert_close(read(x), net(x))


@pytest.mark.parametrize("case", ["plain", "used twice", "in training"])
def test_a_norm_is_folded_only_where_that_is_the_same(case: str) -> None:
    aten, graph, root = torch.ops.aten, torch.fx.Graph(), nn.Module()
    torch.manual_seed(0)
    x = graph.placeholder("x")
    state = []
    for name in ("weight", "bias", "gamma", "beta", "mean", "var"):
        root.register_buffer(name, torch.rand((4, 3, 3, 3) if name == "weight" else 4) + 0.5)
        state.append(graph.get_attr(name))
    conv = graph.call_function(aten.conv2d.default, (x, *state[:2]))
    how = (case == "in training", 0.1, 1e-3, True)
    y = graph.call_function(aten.batch_norm.default, (conv, *state[2:], *how))
    if case == "used twice":
        y = graph.call_function(aten.add.Tensor, (y, conv))
    graph.output((y,))
    module = torch.fx.GraphModule(root, graph)
    made = lean(module)
    calls = [n for n in made.graph.nodes if n.op == "call_function"]
    assert (len(calls) == 1) is (case == "plain")
    given = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(made(given), module(given)[0])


@pytest.mark.parametrize("computed", ["weight", "bias", "gamma", "beta", "mean"])
def test_a_norm_is_folded_only_with_what_is_stored(computed: str) -> None:
    class Scaled(nn.Module):
        """One of the tensors around a convolution and its norm is computed in the forward."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            for state in (*self.parameters(), self.norm.running_mean, self.norm.running_var):
                nn.init.uniform_(state, 0.5, 1.5)

        def forward(self, x: Tensor) -> Tensor:
            conv, norm = self.conv, self.norm
            part = {"weight": conv.weight, "bias": conv.bias, "mean": norm.running_mean}
            part |= {"gamma": norm.weight, "beta": norm.bias}
            part[computed] = part[computed] * 2
            y = nn.functional.conv2d(x, part["weight"], part["bias"])
            statistics = part["mean"], norm.running_var
            return nn.functional.batch_norm(y, *statistics, part["gamma"], part["beta"])

    torch.manual_seed(0)
    net, x = Scaled().eval(), torch.randn(3, 3, 8, 8)
    read = read_program(saved(net, x))
    with torch.no_grad():
        torch.testing.assert_close(lean(read)(x), net(x))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_shared_weights_stay_shared() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(8, 6)
            self.first, self.second = nn.Parameter(whole[:4]), nn.Parameter(whole[4:])

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.first.t() + x @ self.second.t()

    read = read_program(saved(Halves(), torch.randn(3, 6)))
    first, second = read.buffers()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.storage_offset() == 24


def test_pickled_sample_inputs_are_refused_before_torch_loads_them(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    bomb = io.BytesIO()
    torch.save((Bomb(mark),), bomb)
    file, poisoned = saved(convolutions(), torch.randn(3, 3, 8, 8)), io.BytesIO()
    refuse_code(file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(poisoned, "w") as new:
        for name in old.namelist():
            inputs = "/sample_inputs/" in name
            new.writestr(name, bomb.getvalue() if inputs else old.read(name))
    with pytest.raises(PickledProgram, match="sample inputs"):
        refuse_code(poisoned)
    read_program(poisoned)  # never looks at them
    assert not mark.exists()


def test_numbers_of_the_schema() -> None:
    assert schema.SCHEMA_VERSION[0] == program.SCHEMA_MAJOR
    for number, dtype in program.DTYPES.items():
        assert serialize._SERIALIZE_TO_TORCH_DTYPE[number] is dtype
    for number, layout in program.MEMORY_FORMATS.items():
        assert serialize._SERIALIZE_TO_TORCH_MEMORY_FORMAT[number] is layout
    assert schema.Layout.Strided.value == 7


def altered(file: io.BytesIO, suffix: str, change: Callable[[Any], None]) -> io.BytesIO:
    """A copy of the archive with one JSON record changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith(suffix):
                value = json.loads(data)
                change(value)
                data = json.dumps(value).encode()
            new.writestr(name, data)
    out.seek(0)
    return out


def test_a_pickled_weight_is_never_read(tmp_path: Path) -> None:
    """Torch's own loader would run the code in this archive."""
    mark = tmp_path / "ran"

    def poison(config: Any) -> None:
        next(iter(config["config"].values()))["use_pickle"] = True

    file = altered(saved(convolutions(), torch.randn(3, 3, 8, 8)), "weights_config.json", poison)
    bomb = io.BytesIO()
    torch.save(Bomb(mark), bomb, pickle_module=pickle)
    poisoned = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(poisoned, "w") as new:
        for name in old.namelist():
            first = name.endswith("/weight_0")
            new.writestr(name, bomb.getvalue() if first else old.read(name))
    for check in (read_program, is_known, refuse_code):
        poisoned.seek(0)
        with pytest.raises(PickledProgram, match="pickled object"):
            check(poisoned)
    assert not mark.exists()


def disguised(file: io.BytesIO, bomb: bytes) -> dict[str, io.BytesIO]:
    """Archives that torch's own loader would unpickle, or load code of, although no table of
    theirs says so."""
    with zipfile.ZipFile(file) as old:
        records = {name: old.read(name) for name in old.namelist()}
    (config,) = (n for n in records if n.endswith("weights_config.json"))
    top = config.partition("/")[0]
    table = json.loads(records[config])
    next(iter(table["config"].values()))["path_name"] = "opaque_obj_0"
    opaque = {config: json.dumps(table), f"{top}/data/weights/opaque_obj_0": bomb}
    (model,) = (records[n] for n in records if "/models/" in n)
    older = {"version": b"8.1", "serialized_exported_program.json": model}
    older |= dict.fromkeys(("serialized_state_dict.pt", "serialized_constants.pt"), bomb)
    native = {f"{top}/data/aotinductor/model/code.so": b"\x7fELF"}
    made = {}
    for name, content in (
        ("pickled object", records | opaque),
        ("'version' is no record", older),
        ("code.so' is no record", records | native),
    ):
        made[name] = io.BytesIO()
        with zipfile.ZipFile(made[name], "w") as new:
            for record, data in content.items():
                new.writestr(record, data)
    made["two records"] = twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as new:
        for record, data in records.items():
            new.writestr(record, data)
        with pytest.warns(UserWarning, match="Duplicate name"):
            new.writestr(config, records[config])
    return made


@pytest.mark.parametrize(
    "why", ["pickled object", "'version' is no record", "code.so' is no record", "two records"]
)
def test_no_disguise_gets_a_pickle_past_the_check(tmp_path: Path, why: str) -> None:
    mark, bomb = tmp_path / "ran", io.BytesIO()
    torch.save(Bomb(mark), bomb, pickle_module=pickle)
    poisoned = disguised(saved(convolutions(), torch.randn(3, 3, 8, 8)), bomb.getvalue())[why]
    for check in (read_program, is_known, refuse_code):
        poisoned.seek(0)
        with pytest.raises(PickledProgram, match=why):
            check(poisoned)
    assert not mark.exists()


def first_node(value: Any) -> Any:
    return value["graph_module"]["graph"]["nodes"][0]


CHANGES: dict[str, Callable[[Any], None]] = {
    "schema version": lambda v: v["schema_version"].update(major=9),
    "operator": lambda v: first_node(v).update(target="os.system"),
    "operator 'torch.ops.quantized": lambda v: first_node(v).update(
        target="torch.ops.quantized.add.default"
    ),
    "unexpected structure": lambda v: first_node(v).update(target="torch.ops.aten.no.such"),
    "out of order": lambda v: first_node(v)["inputs"].reverse(),
    "argument kind": lambda v: first_node(v)["inputs"][0].update(kind=None),
    "an argument 'as_graph'": lambda v: first_node(v)["inputs"][0].update(arg={"as_graph": {}}),
    "outputs": lambda v: v["graph_module"]["signature"].update(output_specs=[]),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_it_does_not_know(reason: str) -> None:
    file = saved(convolutions(), torch.randn(3, 3, 8, 8))
    changed = altered(file, "models/model.json", CHANGES[reason])
    with pytest.raises(UnknownProgram, match=reason):
        read_program(changed)
    assert not is_known(changed)


def test_damage() -> None:
    file = saved(convolutions(), torch.randn(3, 3, 8, 8))

    def grow(config: Any) -> None:
        meta = next(iter(config["config"].values()))["tensor_meta"]
        meta["sizes"][0]["as_int"] = 4000

    with pytest.raises(RuntimeError, match="out of bounds"):
        read_program(altered(file, "weights_config.json", grow))
    with zipfile.ZipFile(file) as archive:
        record = archive.getinfo(next(n for n in archive.namelist() if n.endswith("/weight_0")))
        content = archive.read(record)
    data = bytearray(file.getvalue())
    data[data.index(content)] ^= 1
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        read_program(io.BytesIO(bytes(data)))
    assert is_known(io.BytesIO(bytes(data)))  # what the weights are is not asked
    with pytest.raises(zipfile.BadZipFile):
        read_program(io.BytesIO(file.getvalue()[: len(data) // 2]))
