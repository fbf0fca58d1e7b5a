"""The nouns that every room shares: tensors' specs, contracts, blocks and their options.

Only the standard library is imported here, so that the client SDK stays small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf, nextafter, prod
from typing import Any

from blockflow.core import limits
from blockflow.core.dims import Bounds, Dim, bounds_of, is_formula, names_in, size_of
from blockflow.core.errors import RequestError

_LARGEST = nextafter(inf, 0)

ROWS = "rows"
"""The name of dim 0 in every contract: rows are what is batched and counted."""

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Element types that may travel, with their size in bytes."""

FLOAT_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})


def integer_range(dtype: str) -> tuple[int, int]:
    """Smallest and largest value of an integer dtype or of bool."""
    bits = 8 * DTYPE_BYTES[dtype]
    if dtype == "bool":
        return 0, 1
    if dtype.startswith("u"):
        return 0, 2**bits - 1
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def tensor_bytes(dtype: str, dims: Iterable[int]) -> int:
    """Size of a contiguous tensor in bytes. Python integers cannot overflow."""
    return DTYPE_BYTES[dtype] * prod(dims)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a block takes or gives: a dtype and dims, of which dim 0 is always ``rows``.

    A dim of what it gives may be a formula of what it takes (:mod:`blockflow.core.dims`).
    ``ranges`` bounds the dynamic dims: name -> (smallest, largest), inclusive; the rows from 1.
    """

    dtype: str
    dims: tuple[Dim, ...]
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if not 1 <= len(self.dims) <= limits.MAX_RANK:
            raise ValueError(f"rank {len(self.dims)} is outside 1..{limits.MAX_RANK}")
        if self.dims[0] != ROWS:
            raise ValueError(f"dim 0 must be {ROWS!r}, not {self.dims[0]!r}")
        for d in self.dims[1:]:
            if isinstance(d, bool) or not isinstance(d, int | str):
                raise ValueError(f"a dim is an integer or a name, not {d!r}")
            if isinstance(d, int) and not 1 <= d <= limits.MAX_DIM:
                raise ValueError(f"dim {d} is outside 1..{limits.MAX_DIM}")
            if ROWS in names_in(d):
                raise ValueError(f"dim {d!r} depends on the rows, as dim 0 alone may")
        for name, (lo, hi) in self.ranges.items():
            if name not in (ROWS, *self.dynamic):
                raise ValueError(f"range for {name!r}, which is not a dim")
            if not 1 <= lo <= hi <= limits.MAX_DIM or (name == ROWS and lo > 1):
                raise ValueError(f"range {lo}..{hi} of {name!r} is empty or out of bounds")
        for d in self.dims:
            if is_formula(d) and min(self.bounds(d)) < 1:
                raise ValueError(f"dim {d!r} is never positive")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(d) for d in self.dims)}]"

    @property
    def dynamic(self) -> tuple[str, ...]:
        """Names of the dynamic dims other than rows, in order of appearance, also in formulas."""
        return tuple(dict.fromkeys(name for d in self.dims[1:] for name in names_in(d)))

    @property
    def bounded(self) -> bool:
        """Whether every dynamic dim but the rows has a range."""
        return all(d in self.ranges for d in self.dynamic)

    def row_bytes(self) -> int:
        """Bytes of one row; dynamic dims count with the largest value of their range, or as 1024
        without one, and formulas as 1 at least: a window of 2048 leaves less of that."""
        return tensor_bytes(self.dtype, (hi for _, hi in self._extents()))

    def least_row_bytes(self) -> int:
        """Bytes of the smallest row that there can be."""
        return tensor_bytes(self.dtype, (lo for lo, _ in self._extents()))

    def _extents(self) -> Iterator[Bounds]:
        """Of the dims of a row, at least 1."""
        ranges = {n: self.ranges.get(n, (1, 1024)) for n in self.dynamic}
        for dim in self.dims[1:]:
            lo, hi = bounds_of(dim, ranges)
            yield max(1, lo), max(1, hi)

    def bind(self, dtype: str, dims: Sequence[int], *, where: str = "") -> dict[str, int]:
        """Match a concrete tensor and return the values of the dynamic dims (``rows`` among them).

        Raises:
            RequestError: CONTRACT_MISMATCH or EMPTY_INPUT, with both sides in the message.
        """

        def got() -> str:
            return f"{dtype}[{', '.join(map(str, dims))}]"

        def mismatch(why: str, hint: str = "send a tensor that fits the contract") -> RequestError:
            return RequestError(
                "CONTRACT_MISMATCH",
                f"{why}: expected {self}, got {got()}",
                where=where,
                hint=hint,
                details={"expected": str(self), "got": got()},
            )

        if dtype != self.dtype:
            raise mismatch("dtype differs", f"convert it to {self.dtype}")
        if len(dims) != len(self.dims):
            raise mismatch("rank differs", "dim 0 is rows: a single input has one row")
        if dims[0] == 0:
            why, hint = f"zero rows: got {got()}", "send at least one row"
            raise RequestError("EMPTY_INPUT", why, where=where, hint=hint)
        binding: dict[str, int] = {}
        for i, (want, have) in enumerate(zip(self.dims, dims, strict=True)):
            if isinstance(want, int):
                if have != want:
                    raise mismatch(f"dim {i} differs")
                continue
            if binding.setdefault(want, have) != have:
                raise mismatch(f"dim {i} ({want}) must equal {binding[want]}")
            if have < 1:
                raise mismatch(f"dim {i} ({want}) must be positive")
            lo, hi = self.ranges.get(want, (1, limits.MAX_DIM))
            if not lo <= have <= hi:
                raise mismatch(f"dim {i} ({want}) is outside {lo}..{hi}")
        return binding

    def resolve(self, binding: Mapping[str, int]) -> tuple[int, ...]:
        """Concrete dims under a binding; every name in ``dims`` must be bound."""
        return tuple(size_of(d, binding) for d in self.dims)

    def bounds(self, dim: Dim) -> Bounds:
        """Smallest and largest extent of one of the dims; of a formula that is less than 1 for some
        inputs, which have no output, the smallest that has one.

        Raises:
            ValueError: a formula may divide by zero.
        """
        ranges = {n: self.ranges.get(n, (1, limits.MAX_DIM)) for n in names_in(dim)}
        lo, hi = bounds_of(dim, ranges)
        return max(lo, 1), min(hi, limits.MAX_DIM)

    def least_dims(self, rows: int = 1) -> tuple[int, ...]:
        """Dims of the smallest tensor with so many rows: what warms a block up, and proves it."""
        least = {name: self.ranges.get(name, (1, 1))[0] for name in self.dynamic}
        return self.resolve({**least, ROWS: rows})

    def accepts(self, other: TensorSpec) -> str:
        """Why this input cannot take ``other`` as it comes out of the previous block ('' if it
        can).

        A fixed dim fits the same number or, here, a dynamic dim whose range covers it. A dynamic
        output fits only a dynamic input whose range is not narrower. What has one name here must be
        one number, name or formula there.
        """
        if self.dtype != other.dtype:
            return f"dtype {other.dtype} into {self.dtype}"
        if len(self.dims) != len(other.dims):
            return f"rank {len(other.dims)} into {len(self.dims)}"
        bound: dict[str, Dim] = {ROWS: ROWS}
        for i, (want, have) in enumerate(zip(self.dims, other.dims, strict=True)):
            if i == 0:
                continue
            if isinstance(want, int):
                if have != want:
                    return f"dim {i}: {have} into {want}"
                continue
            if bound.setdefault(want, have) != have:
                return f"dim {i}: {have} into {want}, which is {bound[want]}"
            lo, hi = self.ranges.get(want, (1, limits.MAX_DIM))
            olo, ohi = other.bounds(have)
            if olo < lo or ohi > hi:
                return f"dim {i}: {have} ({olo}..{ohi}) into {want} ({lo}..{hi})"
        return ""

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"dtype": self.dtype, "dims": list(self.dims)}
        if self.ranges:
            out["ranges"] = {k: list(v) for k, v in self.ranges.items()}
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorSpec:
        """Inverse of :meth:`to_dict`. Raises ValueError or TypeError on nonsense."""
        ranges = {str(k): (int(v[0]), int(v[1])) for k, v in dict(data.get("ranges", {})).items()}
        return cls(str(data["dtype"]), tuple(data["dims"]), ranges)


@dataclass(frozen=True, slots=True)
class Contract:
    """Input and output of a block. Output dims are numbers, or names that the input binds, or
    formulas of such."""

    input: TensorSpec
    output: TensorSpec

    def __post_init__(self) -> None:
        formulas = [d for d in self.input.dims if is_formula(d)]
        if formulas:
            raise ValueError(f"input dims {formulas} are no names")
        unbound = [n for n in self.output.dynamic if n not in self.input.dims]
        if unbound:
            raise ValueError(f"output dims {unbound} are not bound by the input {self.input}")

    def output_dims(self, binding: Mapping[str, int]) -> tuple[int, ...]:
        """Dims of the output for an input that binds its dynamic dims like this.

        Raises:
            RequestError: CONTRACT_MISMATCH: the input is too small for any output.
        """
        dims = self.output.resolve(binding)
        if min(dims) < 1:
            took = {n: binding[n] for n in self.output.dynamic}
            raise RequestError(
                "CONTRACT_MISMATCH",
                f"{took} leaves nothing of {self.output}: {list(dims)}",
                hint="send a larger input",
                details={"expected": str(self.input), "got": str(took)},
            )
        return dims

    def to_dict(self) -> dict[str, Any]:
        return {"input": self.input.to_dict(), "output": self.output.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Contract:
        return cls(TensorSpec.from_dict(data["input"]), TensorSpec.from_dict(data["output"]))


@dataclass(frozen=True, slots=True)
class Padding:
    """A block's promise: padding its input changes no result.

    An input of any values, lengthened at the far end of every dim that is called ``dim`` with
    elements of ``value``, gives an output which, cut back to the former length, is the one of the
    input itself (within the tolerance of its dtype).

    Attributes:
        dim: name of a dynamic dim of the input.
        value: what the input is padded with.
    """

    dim: str
    value: float = 0

    def problem(self, spec: TensorSpec) -> str:
        """Why an input of ``spec`` cannot be padded like this ('' if it can)."""
        if self.dim not in spec.dynamic:
            known = ", ".join(spec.dynamic) or "none"
            return f"{self.dim!r} is no dynamic dim of {spec} (dynamic: {known})"
        if not abs(self.value) <= _LARGEST:  # integers have no bound
            return f"the padding value {self.value} is not finite"
        if spec.dtype in FLOAT_DTYPES:
            return ""
        lo, hi = integer_range(spec.dtype)
        if self.value != int(self.value) or not lo <= self.value <= hi:
            return f"the padding value {self.value} is no {spec.dtype}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        return {"dim": self.dim, "value": self.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Padding:
        return cls(str(data["dim"]), data["value"])


@dataclass(frozen=True, slots=True)
class Variant:
    """A further form of a block's artifact, made of it by ``blockflow convert``.

    Attributes:
        file: its name in the block's folder.
        digest: sha256, hex.
        bytes: size of the file.
        machine: fingerprint of the only machine that it runs on; '' = any.
        refused: engines that may not run it, with what was found when it was made.
    """

    file: str
    digest: str
    bytes: int
    machine: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Variant:
        return cls(
            str(data["file"]),
            str(data["digest"]),
            int(data["bytes"]),
            str(data.get("machine", "")),
            {str(k): str(v) for k, v in dict(data.get("refused", {})).items()},
        )


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What the rest of the system needs to know of a stored block; the manifest's essence.

    Attributes:
        name: unique in a repository.
        version: the maker's label; ``digest`` is what identifies the artifact.
        digest: sha256 of the artifact file, hex.
        format: artifact format; the engine registry maps it to an engine.
        contract: input and output.
        parameters: number of parameters (elements), buffers not counted.
        state_bytes: bytes of parameters and buffers.
        variants: further forms of the artifact, by kind (``onnx``).
        choices: machine fingerprint -> what ``engine: auto`` means there: ``engine``,
            ``precision``, ``options`` and what was measured.
        padding: the block may be padded like this; None: it may not.
        int_below: integers of its input are smaller; None: not known, or there are none.
    """

    name: str
    version: str
    digest: str
    format: str
    contract: Contract
    parameters: int
    state_bytes: int
    variants: Mapping[str, Variant] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    padding: Padding | None = None
    int_below: int | None = None

    @property
    def reference(self) -> str:
        """This version, as commands take it, whichever is the current one."""
        return f"{self.name}@{self.version}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "digest": self.digest,
            "format": self.format,
            "contract": self.contract.to_dict(),
            "parameters": self.parameters,
            "state_bytes": self.state_bytes,
            "variants": {k: v.to_dict() for k, v in self.variants.items()},
            "choices": {k: dict(v) for k, v in self.choices.items()},
            "padding": None if self.padding is None else self.padding.to_dict(),
            "int_below": self.int_below,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BlockInfo:
        padding = data.get("padding")
        return cls(
            str(data["name"]),
            str(data["version"]),
            str(data["digest"]),
            str(data["format"]),
            Contract.from_dict(data["contract"]),
            int(data["parameters"]),
            int(data["state_bytes"]),
            {str(k): Variant.from_dict(v) for k, v in dict(data.get("variants", {})).items()},
            {str(k): dict(v) for k, v in dict(data.get("choices", {})).items()},
            None if padding is None else Padding.from_dict(padding),
            data.get("int_below"),
        )
