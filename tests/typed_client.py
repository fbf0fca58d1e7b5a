"""What a type checker makes of the clients' calls: read by ``make lint``, never run."""

from collections.abc import Sequence
from typing import Any, assert_type

# Misspelt names are found: an ignore without need is an error, too.
from blockflow import Reslut  # type: ignore[attr-defined]  # noqa: F401
from blockflow.client import AsyncClient, Cleint, Client  # type: ignore[attr-defined]  # noqa: F401
from blockflow.client.pending import PendingRequest
from blockflow.client.result import Result
from blockflow.core.errors import BlockFlowError


def calls(client: Client, x: Any, either: str | Sequence[str], some: Sequence[str]) -> None:
    assert_type(client.infer("a", x), Result)
    assert_type(client.infer("a", x, errors="raise", deadline_s=1.0, retries=2), Result)
    assert_type(client.infer(["a", "b"], x), dict[str, Result])
    assert_type(client.infer("a", x, errors="return"), Result | BlockFlowError)
    assert_type(client.infer(("a", "b"), x, errors="return"), dict[str, Result | BlockFlowError])
    assert_type(client.infer(some, x), Any)
    client.infer(either, x)
    assert_type(client.submit("a", x, results="view"), PendingRequest[Result])
    assert_type(client.submit(["a"], x).result(), dict[str, Result])


async def awaited(client: AsyncClient, x: Any) -> None:
    assert_type(await client.infer("a", x), Result)
    assert_type(await client.submit("a", x), Result)
    assert_type(await client.infer(["a"], x, errors="return"), dict[str, Result | BlockFlowError])
