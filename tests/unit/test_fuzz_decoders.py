"""The fuzzer's short form: a few thousand malformed frames per decoder, the same every time."""

from __future__ import annotations

import os
from typing import get_args

import pytest

from blockflow.bench.fuzz.decoder import Decoder
from blockflow.bench.fuzz.decoders import decoders
from blockflow.bench.fuzz.mutate import Mutator
from blockflow.bench.fuzz.run import GROWTH_BYTES, Report, fuzz_decoders, judge
from blockflow.core.errors import WireError
from blockflow.wire import client, control, data, grants

FRAMES = 3000
SEED = 20


@pytest.mark.parametrize("name", list(decoders()))
def test_malformed_frames_are_typed_errors(name: str) -> None:
    decoder = decoders()[name]
    for frame in decoder.valid:
        decoder.decode(frame)  # else only the first check would ever be reached
    report = fuzz_decoders(FRAMES, SEED, {name: decoder})
    assert not report.failures
    assert report.frames == {name: FRAMES}


def test_there_is_a_valid_frame_of_every_kind() -> None:
    """A kind that no sample has is met by luck only."""
    families = {
        "data plane": {data.Data, data.Failure, data.Withdraw},
        "client to dispatcher": set(get_args(client.ToDispatcher)),
        "dispatcher to client": set(get_args(client.ToClient)),
        "control": {
            kind
            for kind in control.ControlMessage.__subclasses__()
            if kind.__module__ == control.__name__
        },
        "side, from a client": set(get_args(grants.FromClient)),
        "side, to a client": set(get_args(grants.FromDispatcher)),
    }
    for name, kinds in families.items():
        decoder = decoders()[name]
        seen = {type(decoder.decode(frame)).__name__ for frame in decoder.valid}
        assert seen == {kind.__name__ for kind in kinds}, name


def test_the_same_seed_makes_the_same_frames() -> None:
    valid = decoders()["control"].valid
    first, again, other = (list(Mutator(valid, s).frames(200)) for s in (1, 1, 2))
    assert first == again != other
    assert sum(f not in valid for f in first) > 150
    assert len(set(first)) > 100


# The detectors see what they are there for.


def test_a_decoder_with_a_defect_is_found() -> None:
    def decode(frame: bytes) -> int:
        if not frame:
            raise WireError("MALFORMED_MESSAGE", "empty")
        return frame[5]  # raises IndexError for short ones

    report = fuzz_decoders(FRAMES, SEED, {"planted": Decoder(decode, [b"a valid one"])})
    (failure,) = report.failures
    assert "planted" in failure and "IndexError" in failure and f"seed {SEED}" in failure


def test_a_process_that_died_or_has_grown_is_found() -> None:
    own = {"up": os.getpid()}
    report = Report()
    judge(own, {"up": 1}, {}, report)
    assert "have changed" in report.failures[0]
    report = Report()
    judge(own, own, {"up": -GROWTH_BYTES}, report)
    assert "up has grown" in report.failures[0]
    report = Report()
    judge(own, own, {"up": 2**50}, report)
    assert not report.failures
