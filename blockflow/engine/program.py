"""Program: an exported program (``.pt2``) read into a graph, data only.

``torch.export.load`` rebuilds what a compiler needs: a fake tensor for every value, symbolic
shapes, guards. Serving needs the operators and the weights. For ResNet-50's third block that is the
difference between 0.55 s and 0.1 s, and 9 to 15 MiB of private memory. It can also be made to run
code from the artifact, in several ways (:mod:`blockflow.engine.archive`, :mod:`~.vetting`). This
reader refuses pickles and operators that do more than compute, and evaluates nothing.

Read are archives of schema version 8 (torch 2.6 and later) with one model, one tensor in, one
tensor out, and aten operators; anything else raises :class:`UnknownProgram`, and the caller takes
the official way. Format: ``torch/_export/serde/schema.py`` and ``torch/csrc/export/pt2_archive
_constants.h`` of the PyTorch sources.
"""

from __future__ import annotations

import operator
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor, fx, nn

from blockflow.engine.archive import MOST_JSON, json_of, refuse_pickles
from blockflow.engine.targets import RefusedProgram, UnknownProgram, operator_of

SCHEMA_MAJOR = 8
"""A change of the major number is one that readers of the old format would misread."""

DTYPES: Mapping[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}
"""The schema's ``ScalarType``."""

MEMORY_FORMATS: Mapping[int, torch.memory_format] = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
"""The schema's ``MemoryFormat``."""

_STRIDED = 7
_POSITIONAL, _KEYWORD = 1, 2
_CHUNK = 1 << 20


def read_program(file: BinaryIO) -> fx.GraphModule:
    """Read an archive.

    Args:
        file: seekable; is left open.

    Returns:
        A module whose graph takes one tensor and returns a 1-tuple of one; weights are buffers.

    Raises:
        UnknownProgram: take ``torch.export.load``.
        RefusedProgram: do not.
        OSError, zipfile.BadZipFile, ValueError: not a sound archive.
    """
    return _read(file, _Parts)


def is_known(file: BinaryIO, most_json: int = MOST_JSON) -> bool:
    """Whether :func:`read_program` can read an archive; its weights are not looked at.

    Args:
        file: seekable; is left open.
        most_json: bytes of a record of text.

    Raises:
        RefusedProgram, OSError, zipfile.BadZipFile, ValueError: as :func:`read_program`.
    """
    try:
        _read(file, _Outline, most_json)
    except UnknownProgram:
        return False
    return True


class _Parts:
    """The records of an archive, under its top folder."""

    def __init__(self, archive: zipfile.ZipFile, most_json: int = MOST_JSON) -> None:
        self._archive, self._most_json = archive, most_json
        names = archive.namelist()
        self._top = names[0].partition("/")[0] + "/" if names else ""
        models = [n for n in names if n.startswith(f"{self._top}models/")]
        if len(models) != 1:
            raise UnknownProgram(f"{len(models)} models in one archive")
        self.model = models[0].rpartition("/")[2].removesuffix(".json")
        self._payloads: dict[str, Tensor] = {}
        self._tables = {
            kind: self.json(f"data/{kind}/{self.model}_{kind}_config.json")["config"]
            for kind in ("weights", "constants")
        }

    def json(self, name: str) -> Any:
        return json_of(self._archive, self._top + name, self._most_json)

    def tensor(self, kind: str, name: str) -> Tensor:
        """A weight or constant; those that share a record share memory."""
        entry = self._tables[kind][name]
        meta = entry["tensor_meta"]
        if meta["layout"] != _STRIDED or meta["device"]["type"] != "cpu":
            raise UnknownProgram(f"layout {meta['layout']} on {meta['device']}")
        dtype = _known(DTYPES, meta["dtype"], "dtype")
        record = f"{self._top}data/{kind}/{entry['path_name']}"
        if record not in self._payloads:
            self._payloads[record] = self._bytes(record)
        flat = self._payloads[record].view(dtype)
        dims, strides = ([_dim(d) for d in meta[key]] for key in ("sizes", "strides"))
        # as_strided checks that the view stays within the storage
        return flat.as_strided(dims, strides, _dim(meta["storage_offset"]))

    def _bytes(self, record: str) -> Tensor:
        size = self._archive.getinfo(record).file_size
        whole = torch.empty(size, dtype=torch.uint8)
        view = memoryview(whole.numpy())  # type: ignore[arg-type]  # numpy's stub before 3.12
        at = 0
        with self._archive.open(record) as part:
            # In pieces: readinto makes a temporary object of the whole length.
            while at < size:
                n = part.readinto(view[at : at + _CHUNK])  # type: ignore[attr-defined]  # a BufferedIOBase
                if not n:
                    raise ValueError(f"record {record!r} is shorter than {size} bytes")
                at += n
        return whole


class _Outline(_Parts):
    """The records of an archive, but for what the weights are."""

    def _bytes(self, record: str) -> Tensor:
        return torch.empty(self._archive.getinfo(record).file_size, dtype=torch.uint8)


class _Reader:
    def __init__(self, program: Mapping[str, Any], parts: _Parts) -> None:
        self._parts = parts
        major = program["schema_version"]["major"]
        if major != SCHEMA_MAJOR:
            raise UnknownProgram(f"schema version {major}")
        self._signature = program["graph_module"]["signature"]
        self._source = program["graph_module"]["graph"]
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._values: dict[str, fx.Node] = {}

    def read(self) -> fx.GraphModule:
        users = 0
        for given in self._signature["input_specs"]:
            ((kind, spec),) = given.items()
            name = spec["arg"]["as_tensor" if kind == "user_input" else "name"]
            match kind:
                case "user_input":
                    users += 1
                    x = self._values[name["name"]] = self._graph.placeholder("x")
                    self._note_rank(spec["arg"], x)
                case "parameter":
                    self._state(name, "weights", spec["parameter_name"])
                case "buffer":
                    kept = "weights" if spec["persistent"] else "constants"
                    self._state(name, kept, spec["buffer_name"])
                case "tensor_constant":
                    self._state(name, "constants", spec["tensor_constant_name"])
                case _:
                    raise UnknownProgram(f"an input of kind {kind!r}")
        results = self._signature["output_specs"]
        if users != 1 or len(results) != 1 or "user_output" not in results[0]:
            raise UnknownProgram(f"{users} inputs, outputs {[next(iter(r)) for r in results]}")
        for node in self._source["nodes"]:
            self._node(node)
        self._graph.output((self._value(results[0]["user_output"]["arg"]),))
        return fx.GraphModule(self._root, self._graph)

    def _state(self, name: str, kind: str, key: str) -> None:
        attribute = f"s{len(self._values)}"
        self._root.register_buffer(attribute, self._parts.tensor(kind, key))
        self._values[name] = self._graph.get_attr(attribute)

    def _node(self, given: Mapping[str, Any]) -> None:
        target = operator_of(given["target"])
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        schema = getattr(target, "_schema", None)
        for item in given["inputs"]:
            value = self._value(item["arg"])
            if schema is None:
                args.append(value)
            elif item["kind"] == _POSITIONAL:
                if schema.arguments[len(args)].name != item["name"]:
                    raise UnknownProgram(f"arguments of {given['target']} out of order")
                args.append(value)
            elif item["kind"] == _KEYWORD:
                if item["name"] not in {a.name for a in schema.arguments}:
                    # fx writes it into the graph's Python as it is
                    raise RefusedProgram(f"no argument of {given['target']}: {item['name']!r:.80}")
                kwargs[item["name"]] = value
            else:
                raise UnknownProgram(f"argument kind {item['kind']!r}")
        node = self._graph.call_function(target, tuple(args), kwargs)
        outputs = given["outputs"]
        if schema is None or (len(schema.returns) == 1 and "as_tensors" not in outputs[0]):
            (output,) = outputs
            self._values[_name(output)] = node
            self._note_rank(output, node)
            return
        if len(outputs) == 1 and "as_tensors" in outputs[0]:
            outputs = [{"as_tensor": part} for part in outputs[0]["as_tensors"]]
        for i, output in enumerate(outputs):
            if "as_none" not in output:
                item = self._graph.call_function(operator.getitem, (node, i))
                self._values[_name(output)] = item

    def _note_rank(self, output: Mapping[str, Any], node: fx.Node) -> None:
        """``meta["rank"]`` is all that serving wants to know of an intermediate tensor."""
        if "as_tensor" in output:
            value = self._source["tensor_values"][output["as_tensor"]["name"]]
            node.meta["rank"] = len(value["sizes"])

    def _value(self, given: Mapping[str, Any]) -> Any:
        """An argument: a tagged union, ``{"as_ints": [1, 2]}``."""
        ((tag, value),) = given.items()
        match tag:
            case "as_none":
                return None
            case "as_tensor" | "as_optional_tensor" if "name" in value:
                return self._values[value["name"]]
            case "as_optional_tensor":
                return self._value(value)
            case "as_int" | "as_bool" | "as_string":
                return value
            case "as_float":  # JSON has no infinity and no NaN: they are written as text
                return float(value)
            case "as_ints" | "as_bools" | "as_strings":
                return list(value)
            case "as_floats":
                return [float(v) for v in value]
            case "as_tensors":
                return [self._values[v["name"]] for v in value]
            case "as_optional_tensors":
                return [self._value(v) for v in value]
            case "as_sym_int" | "as_sym_bool" | "as_sym_float":
                return self._scalar(value)
            case "as_sym_ints" | "as_sym_bools" | "as_sym_floats":
                return [self._scalar(v) for v in value]
            case "as_scalar_type":
                return _known(DTYPES, value, "dtype")
            case "as_memory_format":
                return _known(MEMORY_FORMATS, value, "memory format")
            case "as_layout" if value == _STRIDED:
                return torch.strided
            case "as_device" if value["type"] == "cpu":
                return torch.device("cpu")
        raise UnknownProgram(f"an argument {tag!r}")

    def _scalar(self, given: Mapping[str, Any]) -> Any:
        ((tag, value),) = given.items()
        return self._values[value] if tag == "as_name" else self._value(given)


def _read(file: BinaryIO, records: type[_Parts], most_json: int = MOST_JSON) -> fx.GraphModule:
    with zipfile.ZipFile(file) as archive:
        refuse_pickles(archive, most_json)
        try:
            parts = records(archive, most_json)
            program = parts.json(f"models/{parts.model}.json")
            return _Reader(program, parts).read()
        except (KeyError, TypeError, AttributeError, IndexError) as e:
            raise UnknownProgram(f"unexpected structure: {type(e).__name__}: {e}") from e


def _name(output: Mapping[str, Any]) -> str:
    """Name of the value that an output defines."""
    ((tag, value),) = output.items()
    if tag == "as_tensor":
        return str(value["name"])
    if tag in ("as_sym_int", "as_sym_bool", "as_sym_float"):
        return str(value["as_name"])
    raise UnknownProgram(f"an output {tag!r}")


def _dim(given: Mapping[str, Any]) -> int:
    if "as_int" not in given:
        raise UnknownProgram("a weight with symbolic dims")
    return int(given["as_int"])


def _known(table: Mapping[int, Any], key: int, what: str) -> Any:
    if key not in table:
        raise UnknownProgram(f"{what} {key}")
    return table[key]
