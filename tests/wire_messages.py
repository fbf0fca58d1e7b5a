"""Messages of every protocol as hypothesis draws them, and the decoder of each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from blockflow.core import limits
from blockflow.core.errors import CODES, BlockFlowError, make_error
from blockflow.core.routing import PathNode, PathTree
from blockflow.wire import client, control, data, grants
from blockflow.wire.tensor import DTYPES, Handle, TensorDesc

V = limits.PROTOCOL_VERSION
U64 = 2**64 - 1
QUICK = settings(max_examples=60, deadline=None)

Decoder = Callable[[bytes], object]
DECODERS: dict[str, Decoder] = {
    "data": data.decode_data_plane,
    "to dispatcher": client.decode_to_dispatcher,
    "to client": client.decode_to_client,
    "control": control.decode_control,
    "side to dispatcher": grants.decode_from_client,
    "side to client": grants.decode_from_dispatcher,
}


u64 = st.integers(0, U64)
u32 = st.integers(1, 2**32 - 1)
slots = st.integers(0, limits.MAX_GRANT_SLOTS - 1)
request_ids = st.binary(min_size=16, max_size=16)
names = st.text(min_size=1, max_size=limits.MAX_NAME_CHARS)
texts = st.text(max_size=30)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), U64) | st.floats() | texts | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@st.composite
def descs(draw: st.DrawFn, rows: int | None = None, frames_only: bool = False) -> TensorDesc:
    dims = draw(st.lists(st.integers(0, 5), min_size=0 if rows is not None else 1, max_size=7))
    dims = ([] if rows is None else [rows]) + dims
    handle = strides = None
    if not frames_only:
        handle = draw(
            st.none()
            | st.builds(
                Handle,
                st.integers(1, U64),
                st.integers(0, 2**32 - 1),
                st.integers(0, 255),
                st.integers(1, 2**32 - 1),
                u64,
            )
        )
        strides = draw(
            st.none()
            | st.lists(st.integers(0, 1000), min_size=len(dims), max_size=len(dims)).map(tuple)
        )
    return TensorDesc(draw(st.sampled_from(DTYPES)), tuple(dims), handle, strides)


@st.composite
def trees(draw: st.DrawFn) -> PathTree:
    count = draw(st.integers(1, 6))
    return PathTree(
        tuple(
            PathNode(
                draw(st.integers(1, 2**40)),
                -1 if i == 0 else draw(st.integers(0, i - 1)),
                draw(st.booleans()),
            )
            for i in range(count)
        )
    )


hop_timings = st.builds(data.HopTiming, st.integers(0, 255), u64, u64, u64, u64)
timings = st.lists(hop_timings, max_size=4).map(tuple)


@st.composite
def items(draw: st.DrawFn) -> data.Item:
    tree = draw(trees())
    return data.Item(
        draw(request_ids),
        draw(st.integers(1, 255)),
        draw(u64),
        tree,
        draw(st.integers(0, len(tree.nodes) - 1)),
        draw(st.integers(1, 100)),
        draw(st.integers(0, limits.MAX_DEADLINE_MS)),
        data.pack_timings(draw(timings)),
        draw(st.integers(0, limits.MAX_SHARES)),
        draw(st.booleans()),
    )


@st.composite
def errors(draw: st.DrawFn) -> BlockFlowError:
    return make_error(
        draw(st.sampled_from(sorted(CODES))),
        draw(texts),
        where=draw(texts),
        hint=draw(texts),
        retry_after_ms=draw(st.none() | st.integers(0, 10**6)),
    )


@st.composite
def data_messages(draw: st.DrawFn) -> data.Data | data.Failure:
    some = tuple(draw(st.lists(items(), min_size=1, max_size=3)))
    sender, sent_ns = draw(st.integers(1, U64)), draw(u64)
    if draw(st.booleans()):
        desc = draw(descs(rows=sum(i.rows for i in some)))
        return data.Data(sender, sent_ns, desc, some)
    return data.Failure(sender, sent_ns, draw(errors()), some)


to_dispatcher: st.SearchStrategy[client.ToDispatcher] = (
    st.builds(
        client.Request,
        request_ids,
        st.lists(names, min_size=1, max_size=limits.MAX_TASKS_PER_REQUEST).map(tuple),
        st.integers(1, limits.MAX_DEADLINE_MS),
        descs(frames_only=True),
        st.none() | st.tuples(u32, slots),
        st.integers(0, client.MAX_TRIES),
    )
    | st.builds(client.Cancel, request_ids)
    | st.builds(client.Describe, request_ids)
    | st.builds(client.Invite, request_ids)
)


@st.composite
def results(draw: st.DrawFn) -> client.TaskResult:
    tensor, error = draw(
        st.tuples(descs(frames_only=True), st.none()) | st.tuples(st.none(), errors())
    )
    hops = draw(timings)
    named = tuple(client.Timing(draw(names), hop) for hop in hops)
    places = st.none() | st.builds(client.Place, u32, slots, u32)
    place = draw(places) if tensor is not None else None
    times = draw(u64), draw(u64), draw(u64)
    return client.TaskResult(draw(texts), tensor, error, named, *times, place, draw(st.booleans()))


to_client: st.SearchStrategy[client.ToClient] = (
    st.builds(client.Reply, request_ids, u64, st.lists(results(), max_size=3).map(tuple), u64)
    | st.builds(
        client.Description,
        request_ids,
        u64,
        st.lists(st.dictionaries(texts, plain, max_size=3), max_size=3).map(tuple),
        st.dictionaries(texts, st.integers(0, 2**40), max_size=3),
    )
    | st.builds(client.Invitation, request_ids, texts, request_ids, texts.filter(bool))
    | st.builds(client.Invitation, request_ids, texts.filter(bool), request_ids, st.just(""))
)

side_to_dispatcher: st.SearchStrategy[grants.FromClient] = st.builds(
    grants.Attach, request_ids
) | st.builds(
    grants.Ask, st.sampled_from(grants.Direction), st.integers(1, limits.MAX_MESSAGE_BYTES)
)
side_to_client: st.SearchStrategy[grants.FromDispatcher] = st.builds(
    grants.Granted,
    u32,
    st.sampled_from(grants.Direction),
    st.integers(1, limits.MAX_MESSAGE_BYTES),
    st.integers(1, limits.MAX_GRANT_SLOTS),
) | st.builds(
    grants.Refused,
    st.sampled_from(grants.Direction),
    st.integers(1, limits.MAX_MESSAGE_BYTES),
    texts,
)


def control_messages() -> st.SearchStrategy[control.ControlMessage]:
    by_type: dict[type, st.SearchStrategy[Any]] = {
        int: u64,
        float: st.floats(allow_nan=False),
        str: texts,
        list: st.lists(texts, max_size=3),
        dict: st.dictionaries(texts, plain, max_size=3),
    }
    return st.one_of(
        *(
            st.builds(cls, **{name: by_type[t] for name, t in control._FIELDS[kind].items()})
            for kind, cls in control._KINDS.items()
        )
    )


withdrawn = st.lists(
    st.tuples(request_ids, st.integers(1, 255)),
    min_size=1,
    max_size=limits.MAX_WITHDRAWN_PER_MESSAGE,
).map(tuple)
withdrawals = st.builds(data.Withdraw, st.integers(1, U64), withdrawn)
