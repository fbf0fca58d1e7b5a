"""``blockflow infer``: one request from the command line."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockflow.cli.options import Address, ClientKeys, Json, Tasks, print_json, print_line
from blockflow.cli.outputs import writing
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError

if TYPE_CHECKING:
    from blockflow.client import Client, Result

_SHOWN_ELEMENTS = 1000
"""``--json`` holds the values of results up to this size; larger ones need --output."""


def infer(
    tasks: Tasks,
    input_: Annotated[
        str, typer.Option("--input", "-i", help="A .npy file, or FILE.safetensors[:TENSOR].")
    ] = "",
    random: Annotated[
        bool, typer.Option("--random", help="Random input that fits the task's contract.")
    ] = False,
    rows: Annotated[
        int, typer.Option(min=1, max=limits.MAX_ROWS, help="Rows of the random input.")
    ] = 1,
    dim: Annotated[
        list[str] | None, typer.Option(help="NAME=N: a dynamic dim of the random input.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random input.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Save the result: a .npy file."),
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds; by default the topology's own.")
    ] = None,
    address: Address = "",
    client_keys: ClientKeys = "",
    json_: Json = False,
) -> None:
    """Send one request for TASKS and show the answer and where its time went."""
    if bool(input_) == random:
        raise RequestError("INVALID_REQUEST", "give either --input FILE or --random")
    if output is not None and output.suffix != ".npy":
        raise RequestError("INVALID_REQUEST", "--output is a .npy file", where=str(output))
    from blockflow.client import Client

    with Client(address or None, connect_timeout_s=2.0, client_keys=client_keys or None) as client:
        if random:
            x, dtype = _random(client, tasks, rows, dim or [], seed)
        else:
            x, dtype = _load(input_)
            if dtype is None and x.dtype == "uint16":
                dtype = _patterns(client, tasks[0])
        answers = client.infer(tasks, x, deadline_s=deadline, dtype=dtype, errors="return")
    good: dict[str, Result] = {
        t: a for t, a in answers.items() if not isinstance(a, BlockFlowError)
    }
    bad = {t: a for t, a in answers.items() if isinstance(a, BlockFlowError)}
    saved = _save(good, output) if output is not None and good else {}
    if bad and (not good or not json_):
        # Nothing to print beside the error: main() reports it, in either form.
        for task, result in good.items():
            _print(task, result, saved.get(task, ""))
        raise next(iter(bad.values()))
    if json_:
        document = {t: _document(a, saved.get(t, "")) for t, a in answers.items()}
        print_json({"results": document})
    else:
        for task, result in good.items():
            _print(task, result, saved.get(task, ""))
    if bad:
        from blockflow.cli.exits import exit_code

        raise typer.Exit(exit_code(next(iter(bad.values()))))


def _load(source: str) -> tuple[Any, str | None]:
    import numpy as np

    path, _, name = source.partition(".safetensors:")
    file = Path(path + ".safetensors" if name else path)
    try:
        if file.suffix == ".npy":
            found = np.load(file, allow_pickle=False)
            if not isinstance(found, np.ndarray):
                raise ValueError("an archive of arrays, whatever its name says")
            return found, None
        if file.suffix == ".safetensors":
            return _load_safetensors(file, name)
    except Exception as exc:  # parsers of headers and archives may raise nearly anything
        why = str(exc) or type(exc).__name__
        raise RequestError("INVALID_REQUEST", f"cannot read it: {why}", where=source) from exc
    raise RequestError("INVALID_REQUEST", "the input is a .npy or .safetensors file", where=source)


def _load_safetensors(file: Path, name: str) -> tuple[Any, str | None]:
    import numpy as np
    from safetensors import SafetensorError, deserialize

    try:
        found = dict(deserialize(file.read_bytes()))
    except SafetensorError as exc:
        raise ValueError(str(exc)) from exc
    if not name and len(found) == 1:
        name = next(iter(found))
    if name not in found:
        raise ValueError(f"name one of its tensors: {file}:NAME with {', '.join(sorted(found))}")
    entry = found[name]
    # numpy has no bfloat16: its patterns travel as they are.
    dtypes = {"BF16": "uint16", "F16": "float16", "F32": "float32", "F64": "float64"}
    dtypes |= {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
    dtypes |= {"U8": "uint8", "BOOL": "bool"}
    if entry["dtype"] not in dtypes:
        raise ValueError(f"dtype {entry['dtype']} cannot travel")
    array = np.frombuffer(entry["data"], dtypes[entry["dtype"]]).reshape(entry["shape"])
    return array, "bfloat16" if entry["dtype"] == "BF16" else None


def _patterns(client: Client, task: str) -> str | None:
    """bfloat16, where ``task`` takes that: numpy holds its patterns as uint16, and ``--output``
    has written them so."""
    known = client.tasks().get(task)
    return "bfloat16" if known is not None and known.contract.input.dtype == "bfloat16" else None


def _random(
    client: Client, tasks: list[str], rows: int, dims: list[str], seed: int
) -> tuple[Any, str | None]:
    import numpy as np

    from blockflow.core.model import FLOAT_DTYPES, ROWS

    published = client.tasks()
    if tasks[0] not in published:
        known = ", ".join(sorted(published)) or "none"
        raise RequestError(
            "UNKNOWN_TASK", f"no task {tasks[0]!r}", where=tasks[0], hint=f"published: {known}"
        )
    spec = published[tasks[0]].contract.input
    chosen = {ROWS: rows}
    for text in dims:
        name, _, value = text.partition("=")
        if name not in spec.dynamic or not value.isdecimal():
            known = ", ".join(spec.dynamic) or "none"
            raise RequestError(
                "INVALID_REQUEST", f"--dim {text}: the task's dynamic dims are {known}"
            )
        chosen[name] = int(value)
    for name in spec.dynamic:
        low, high = spec.ranges.get(name, (1, 1024))
        chosen.setdefault(name, max(low, min(high, 16)))
    shape = spec.resolve(chosen)
    if prod(shape) > limits.MAX_MESSAGE_BYTES:
        raise RequestError(
            "TOO_LARGE", f"{list(shape)} is more than a request may bring", where="--rows, --dim"
        )
    generator = np.random.default_rng(seed)
    if spec.dtype not in FLOAT_DTYPES:
        # 0 and 1 are valid indices of any table, whatever the block looks up with them.
        return generator.integers(0, 2, shape).astype(spec.dtype), None
    floats = generator.standard_normal(shape, dtype=np.float32)
    if spec.dtype == "bfloat16":
        return (floats.view(np.uint32) >> 16).astype(np.uint16), "bfloat16"
    return floats.astype(spec.dtype), None


def _save(results: dict[str, Result], output: Path) -> dict[str, str]:
    """One file per task: ``out.npy``, or ``out.TASK.npy`` when there are several."""
    import numpy as np

    saved = {}
    for task, r in results.items():
        file = output if len(results) == 1 else output.with_suffix(f".{task}.npy")
        with writing(file):
            np.save(file, r.value, allow_pickle=False)
        saved[task] = str(file)
    return saved


def _document(answer: Result | BlockFlowError, saved: str) -> dict[str, Any]:
    if isinstance(answer, BlockFlowError):
        return {"error": answer.to_dict()}
    small = answer.value.size <= _SHOWN_ELEMENTS
    return {
        "dtype": answer.dtype,
        "dims": list(answer.value.shape),
        "values": _plain(_numbers(answer)) if small else None,
        "output": saved or None,
        "epoch": answer.epoch,
        "canary": answer.canary,
        "request_id": answer.request_id.hex(),
        "rtt_ms": answer.rtt_ms,
        "total_ms": answer.total_ms,
        "ingress_ms": answer.ingress_ms,
        "egress_ms": answer.egress_ms,
        "upload": answer.upload.to_dict(),
        "download": answer.download.to_dict(),
        "timings": [t.to_dict() for t in answer.timings],
    }


def _numbers(result: Result) -> Any:
    """The values; of bfloat16, whose patterns numpy holds as uint16, in float32."""
    import numpy as np

    if result.dtype != "bfloat16":
        return result.value
    return (result.value.astype(np.uint32) << 16).view(np.float32)


def _plain(array: Any) -> Any:
    """Nested lists; JSON has no NaN and no infinity, so these become null."""
    import numpy as np

    if array.dtype.kind == "f" and not np.isfinite(array).all():
        array = array.astype(object)
        array[~np.isfinite(array.astype(float))] = None
    return array.tolist()


def _print(task: str, result: Result, saved: str) -> None:
    import numpy as np

    from blockflow.monitor.view import timing_lines

    dims = ", ".join(str(d) for d in result.value.shape)
    tried = ", canary" if result.canary else ""
    print_line(f"{task}: {result.dtype}[{dims}], epoch {result.epoch}{tried}")
    if saved:
        print_line(f"  saved to {saved}")
    else:
        text = np.array2string(_numbers(result), precision=4, threshold=40, edgeitems=2)
        print_line("  " + text.replace("\n", "\n  "))
    for line in timing_lines(result):
        print_line("  " + line)
