"""Types of the clients' calls, for their overloads."""

from __future__ import annotations

from typing import TypeAlias, TypedDict

from blockflow.client.connection import RequestId, Results
from blockflow.client.result import Result
from blockflow.core.errors import BlockFlowError

Names: TypeAlias = list[str] | tuple[str, ...]
"""Several tasks; a lone ``str`` is none of these, though it is a sequence of strings."""

Either: TypeAlias = Result | BlockFlowError


class Options(TypedDict, total=False):
    """What every call takes beside its tasks, its input and ``errors``."""

    deadline_s: float | None
    request_id: RequestId
    dtype: str | None
    results: Results
    retries: int
