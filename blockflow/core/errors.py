"""One root error with a small family and stable codes.

A code means the same on the wire, in REST bodies, in the SDK and in logs. Every error says what
was wrong (``message``), where (``where``: a JSON path, a block, a request id, a file) and what to
do (``hint``). Foreign exceptions are translated once, at the border where they enter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar


class Fault(StrEnum):
    """Whose fault an error is; it decides who should act on it."""

    CLIENT = "client"
    BLOCK = "block"
    SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """What a stable error code means.

    ``http`` is the REST status, ``retryable`` says whether the same call may succeed later.
    """

    family: str
    fault: Fault
    http: int
    retryable: bool
    meaning: str


def _c(family: str, fault: Fault, http: int, meaning: str, *, retryable: bool = False) -> CodeInfo:
    return CodeInfo(family, fault, http, retryable, meaning)


_CL, _BL, _SY = Fault.CLIENT, Fault.BLOCK, Fault.SYSTEM

CODES: Mapping[str, CodeInfo] = {
    # A request and its answer.
    "UNKNOWN_TASK": _c("request", _CL, 404, "the request names a task that is not deployed"),
    "CONTRACT_MISMATCH": _c("request", _CL, 422, "dtype, rank or dims do not fit the block"),
    "EMPTY_INPUT": _c("request", _CL, 422, "the input tensor has zero rows or zero elements"),
    "NON_FINITE_INPUT": _c("request", _CL, 422, "the input tensor holds NaN or infinity"),
    "TOO_LARGE": _c("request", _CL, 413, "the message or tensor exceeds a limit"),
    "DUPLICATE_REQUEST": _c("request", _CL, 409, "a request with this id is in flight"),
    "DEADLINE_EXCEEDED": _c("request", _SY, 504, "no result before the deadline", retryable=True),
    "CANCELLED": _c("request", _CL, 499, "the client cancelled the request"),
    "OVERLOADED": _c("request", _SY, 503, "no credit left; try again later", retryable=True),
    "NOT_READY": _c("request", _SY, 503, "the system has no topology yet", retryable=True),
    "BLOCK_UNAVAILABLE": _c("request", _SY, 503, "a block of the path is down", retryable=True),
    "WORKER_LOST": _c("request", _SY, 502, "the worker died with the request", retryable=True),
    "POISON": _c("request", _CL, 422, "two workers died while they executed this request"),
    "CONNECTION_LOST": _c("request", _SY, 503, "the connection was lost", retryable=True),
    "INVALID_REQUEST": _c("request", _CL, 400, "a value of the call is out of its range"),
    "FILE_EXISTS": _c("request", _CL, 409, "there is a file of that name already"),
    # A frame on a socket.
    "MALFORMED_MESSAGE": _c("wire", _CL, 400, "the bytes are not a message of this protocol"),
    "UNSUPPORTED_VERSION": _c("wire", _CL, 400, "the peer speaks another protocol version"),
    # A system update.
    "INVALID_TOPOLOGY": _c("topology", _CL, 422, "the update has errors; each has its JSON path"),
    "UPDATE_FAILED": _c(
        "topology", _SY, 500, "the update failed; the old epoch keeps serving", retryable=True
    ),
    "UPDATE_IN_PROGRESS": _c("topology", _CL, 409, "another update is running", retryable=True),
    "EPOCH_MISMATCH": _c("topology", _CL, 409, "another epoch is in force than the one named"),
    # The block repository and exports.
    "UNKNOWN_BLOCK": _c("repository", _CL, 404, "no such block"),
    "CORRUPT_MANIFEST": _c("repository", _BL, 422, "the manifest cannot be read or is invalid"),
    "ARTIFACT_MISSING": _c("repository", _BL, 422, "the manifest's artifact file is not there"),
    "DIGEST_MISMATCH": _c("repository", _BL, 422, "the artifact is not the one in the manifest"),
    "UNSUPPORTED_FORMAT": _c("repository", _BL, 422, "no engine loads this artifact format"),
    "FACTORY_FAILED": _c("export", _CL, 422, "the model factory cannot be imported or called"),
    "WEIGHTS_INVALID": _c("export", _CL, 422, "the weights file does not fit the model"),
    "NOT_SPLITTABLE": _c("export", _CL, 422, "the model cannot be cut at the named places"),
    "EXPORT_FAILED": _c("export", _CL, 422, "the model cannot be exported"),
    "EXPORT_MISMATCH": _c(
        "export",
        _BL,
        422,
        "the blocks differ from the model, or answer differently by batch or call",
    ),
    "VERSION_EXISTS": _c("export", _CL, 409, "this version of the block is stored already"),
    "REPOSITORY_UNUSABLE": _c("repository", _SY, 500, "the block's folder cannot be written"),
    # A block's profile: read beside the manifest, measured by ``blockflow profile``.
    "NO_PROFILE": _c("repository", _CL, 404, "the block was not profiled on this machine"),
    "STALE_PROFILE": _c("repository", _CL, 409, "the profile is of another artifact or machine"),
    # A block at work.
    "LOAD_FAILED": _c("block", _BL, 500, "the engine could not load or warm up the artifact"),
    "UNSUPPORTED_ENGINE": _c("block", _CL, 422, "engine, precision, options or device do not fit"),
    "BLOCK_FAILED": _c("block", _BL, 500, "the block raised an error on this input"),
    "OUTPUT_MISMATCH": _c("block", _BL, 500, "the block's output breaks its contract"),
    "START_TIMEOUT": _c("block", _SY, 504, "the worker was not ready in time", retryable=True),
    # The machine and the control plane.
    "PORT_IN_USE": _c("system", _SY, 500, "another process listens on the address"),
    "NO_SPACE": _c(
        "system",
        _SY,
        507,
        "no memory (shared, a device's), disk space, process, thread, descriptor or port is left",
        retryable=True,
    ),
    "ALREADY_RUNNING": _c("system", _CL, 409, "another instance uses this state directory"),
    "NOT_RUNNING": _c("system", _CL, 503, "no system answers at this address"),
    "STATE_CORRUPT": _c("system", _SY, 500, "the stored state cannot be read"),
    "STATE_UNUSABLE": _c("system", _SY, 500, "the state directory cannot be used"),
    "BAD_BODY": _c("system", _CL, 400, "the request body is not what this resource takes"),
    "BODY_TOO_LARGE": _c("system", _CL, 413, "the request body exceeds the limit"),
    "UNSUPPORTED_MEDIA": _c("system", _CL, 415, "the body must be application/json"),
    "NOT_FOUND": _c("system", _CL, 404, "no such resource"),
    "METHOD_NOT_ALLOWED": _c("system", _CL, 405, "the resource does not take this method"),
    "FOREIGN_ORIGIN": _c("system", _CL, 403, "a web page of another site sent the request"),
    "UNAUTHORIZED": _c("system", _CL, 401, "a token or key is missing or unfit"),
    "TIMEOUT": _c("system", _SY, 504, "a peer did not answer in time", retryable=True),
    "MISSING_EXTRA": _c("system", _CL, 501, "an optional package is needed for this"),
    "BENCHMARK_FAILED": _c("system", _SY, 500, "what was to be measured ended badly"),
    "INTERNAL": _c("system", _SY, 500, "a defect in BlockFlow"),
}


class BlockFlowError(Exception):
    """Root of all errors that BlockFlow raises on purpose.

    Args:
        code: a key of :data:`CODES`.
        message: what was wrong, with the offending value.
        where: a JSON path, block, request id, file or address.
        hint: what the reader can do about it.
        details: further facts as plain JSON values.
        retry_after_ms: for OVERLOADED, when a retry makes sense.
        retryable: False where the same call may do harm, though errors of this code can be retried.
    """

    family: ClassVar[str] = "system"

    def __init__(
        self,
        code: str,
        message: str,
        *,
        where: str = "",
        hint: str = "",
        details: Mapping[str, Any] | None = None,
        retry_after_ms: int | None = None,
        retryable: bool = True,
    ) -> None:
        if code not in CODES:
            code, message = "INTERNAL", f"unknown error code {code!r}: {message}"
        super().__init__(message)
        self.code = code
        self.message = message
        self.where = where
        self.hint = hint
        self.details: dict[str, Any] = dict(details or {})
        self.retry_after_ms = retry_after_ms
        self._harmless = retryable

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is copied and pickled (by pools of processes, say) as a call of its class
        # with ``args``, which lack the code: made without a call, it takes its attributes along.
        return _bare, (type(self), *self.args), self.__dict__

    @property
    def info(self) -> CodeInfo:
        return CODES[self.code]

    @property
    def fault(self) -> Fault:
        return self.info.fault

    @property
    def retryable(self) -> bool:
        return self.info.retryable and self._harmless

    def __str__(self) -> str:
        text = f"{self.code}: {self.message}"
        if self.where:
            text += f" (at {self.where})"
        if self.hint:
            text += f" -- {self.hint}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form: what REST bodies and ``--json`` print."""
        out: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "fault": str(self.fault),
            "retryable": self.retryable,
        }
        if self.where:
            out["where"] = self.where
        if self.hint:
            out["hint"] = self.hint
        if self.details:
            out["details"] = self.details
        if self.retry_after_ms is not None:
            out["retry_after_ms"] = self.retry_after_ms
        return out


def _bare(kind: type[BlockFlowError], *args: Any) -> BlockFlowError:
    """An error before its attributes are set."""
    return kind.__new__(kind, *args)


class RequestError(BlockFlowError):
    """A request was rejected, expired, cancelled or lost."""

    family = "request"


class WireError(BlockFlowError):
    """Bytes on a socket are not a message of this protocol."""

    family = "wire"


class RepositoryError(BlockFlowError):
    """A block's folder, manifest or artifact is missing or altered."""

    family = "repository"


class ExportError(BlockFlowError):
    """A model cannot be split, exported or verified."""

    family = "export"


class BlockError(BlockFlowError):
    """A block failed to load or to compute."""

    family = "block"


class SystemError_(BlockFlowError):
    """The machine or the control plane cannot do what was asked."""

    family = "system"


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding of a validation: ``path`` is the JSON path of the offending value, ``code`` that
    of the error that it comes from, if there was one."""

    path: str
    message: str
    hint: str = ""
    code: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" + (f" -- {self.hint}" if self.hint else "")

    def to_dict(self) -> dict[str, str]:
        out = {"path": self.path, "message": self.message}
        if self.hint:
            out["hint"] = self.hint
        if self.code:
            out["code"] = self.code
        return out


MOST_FINDINGS = 100
"""Of one object; the rest are counted. A body has room for a hundred thousand unknown fields."""


def further(count: int, base: str) -> list[Problem]:
    """That of ``count`` findings about the object at ``base`` some are not told, if so."""
    left = count - MOST_FINDINGS
    return [Problem(base, f"and {left} more such finding{'s' if left > 1 else ''}")] * (left > 0)


class TopologyError(BlockFlowError):
    """A system update is invalid, failed or came at the wrong time.

    ``problems`` lists every finding at once, so that a caller mends them in one go.
    """

    family = "topology"

    def __init__(
        self, code: str, message: str, *, problems: Sequence[Problem] = (), **kw: Any
    ) -> None:
        super().__init__(code, message, **kw)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"  {p}" for p in self.problems)])

    def to_dict(self) -> dict[str, Any]:
        out = super().to_dict()
        if self.problems:
            out["problems"] = [p.to_dict() for p in self.problems]
        return out


_FAMILIES: Mapping[str, type[BlockFlowError]] = {
    cls.family: cls
    for cls in (
        RequestError,
        WireError,
        RepositoryError,
        ExportError,
        BlockError,
        SystemError_,
        TopologyError,
    )
}


def make_error(code: str, message: str, **kw: Any) -> BlockFlowError:
    """Build the family member that owns ``code``."""
    info = CODES.get(code)
    cls = _FAMILIES[info.family] if info else BlockFlowError
    return cls(code, message, **kw)


def from_dict(data: Mapping[str, Any]) -> BlockFlowError:
    """Inverse of :meth:`BlockFlowError.to_dict`; unknown codes become INTERNAL, never a crash."""
    kw: dict[str, Any] = {
        "where": str(data.get("where", "")),
        "hint": str(data.get("hint", "")),
    }
    details = data.get("details")
    if isinstance(details, Mapping):
        kw["details"] = details
    retry = data.get("retry_after_ms")
    if isinstance(retry, int):
        kw["retry_after_ms"] = retry
    kw["retryable"] = data.get("retryable") is not False
    code = str(data.get("code", "INTERNAL"))
    problems = data.get("problems")
    if CODES.get(code, None) is not None and CODES[code].family == "topology":
        kw["problems"] = [
            Problem(*(str(p.get(key, "")) for key in ("path", "message", "hint", "code")))
            for p in (problems if isinstance(problems, list | tuple) else ())
            if isinstance(p, Mapping)
        ]
    return make_error(code, str(data.get("message", "")), **kw)


def codes_table() -> str:
    """All codes as a Markdown table; docs/errors.md contains it and a test keeps both in step."""
    lines = [
        "| code | family | whose fault | REST | retry | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for code, c in CODES.items():
        retry = "yes" if c.retryable else "no"
        lines.append(f"| `{code}` | {c.family} | {c.fault} | {c.http} | {retry} | {c.meaning} |")
    return "\n".join(lines)
