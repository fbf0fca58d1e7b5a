"""The manifest: what is valid passes unchanged, everything else is refused with file and field."""

import json

import pytest

from blockflow.core.errors import RepositoryError
from blockflow.core.model import Padding
from blockflow.repository.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    is_block_name,
    parse_manifest,
)

VALID = {
    "schema_version": 1,
    "name": "trunk1",
    "version": "1",
    "format": "pt2",
    "artifact": "abc.pt2",
    "sha256": "0" * 64,
    "size": 10,
    "contract": {
        "input": {"dtype": "int64", "dims": ["rows", "length"], "ranges": {"length": [1, 512]}},
        "output": {"dtype": "float32", "dims": ["rows", "length", 8], "ranges": {}},
    },
    "parameters": 3,
    "state_bytes": 12,
    "measured": {"ms": 0.5, "output_bytes": 32},
    "source": {"model": "zoo", "part": "layer1", "seed": 0},
    "chain": {"model": "zoo", "position": 1, "of": 2},
    "tools": {"torch": "2.13.0"},
    "created": "2026-01-02T03:04:05+00:00",
}

CHOICE = {
    "engine": "onnxruntime",
    "precision": "fp32",
    "ms": 1.0,
    "reference_ms": 2.0,
    "error": 0.0,
    "tolerance": 0.01,
    "when": "2026-01-02T03:04:05+00:00",
}


def parse(data: object, folder: str = "trunk1") -> Manifest:
    return parse_manifest(json.dumps(data).encode(), where="file", folder=folder)


def changed(path: str, value: object) -> dict:
    data = json.loads(json.dumps(VALID))
    at = data
    *parents, last = path.split(".")
    for key in parents:
        at = at[key]
    at[last] = value
    return data


def test_a_choice_of_the_right_form_passes() -> None:
    assert parse(changed("choices", {"m": {**CHOICE, "options": {"spin": True}}})).choices


def test_a_valid_manifest_survives_the_round_trip() -> None:
    manifest = parse(VALID)
    assert parse_manifest(manifest.to_json(), where="file", folder="trunk1") == manifest
    info = manifest.to_info()
    assert (info.name, info.digest, info.format) == ("trunk1", "0" * 64, "pt2")
    assert info.contract.input.ranges == {"length": (1, 512)}
    assert info.contract.output.dims == ("rows", "length", 8)


def test_one_of_a_later_version_is_not_called_damaged() -> None:
    with pytest.raises(RepositoryError) as e:
        parse({**changed("schema_version", 2), "signature": "of a field yet to come"})
    assert e.value.code == "CORRUPT_MANIFEST" and "another version of BlockFlow" in e.value.message
    assert "a later one" in e.value.hint
    assert {f["field"] for f in e.value.details["fields"]} == {"schema_version", "signature"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema_version", 2),
        ("name", "../up"),
        ("name", "a\n"),
        ("version", ""),
        ("format", "PT2"),
        ("artifact", "../abc.pt2"),
        ("artifact", "a/b"),
        ("artifact", ".hidden"),
        ("artifact", "manifest.json"),
        ("sha256", "0" * 63),
        ("sha256", "Z" * 64),
        ("size", -1),
        ("size", "10"),
        ("size", 1.5),
        ("contract.input.dtype", "complex64"),
        ("contract.input.dims", []),
        ("contract.input.dims", ["length", "rows"]),
        ("contract.input.dims", ["rows", True]),
        ("contract.input.dims", ["rows", 0]),
        ("contract.input.ranges", {"width": [1, 2]}),
        ("contract.input.ranges", {"length": [5, 2]}),
        ("contract.input.ranges", {"length": [1]}),
        ("contract.output.dims", ["rows", "width"]),
        ("measured.ms", -1.0),
        ("chain.position", 0),
        ("created", "yesterday"),
        ("created", "2026-01-02T03:04:05"),
        ("tools", {"torch": 2}),
        ("surprise", 1),
        ("contract.extra", 1),
        ("padding", {"dim": "width", "value": 0, "error": 0.0, "tolerance": 0.0}),
        ("padding", {"dim": "rows", "value": 0, "error": 0.0, "tolerance": 0.0}),
        ("padding", {"dim": "length", "value": 0.5, "error": 0.0, "tolerance": 0.0}),
        ("padding", {"dim": "length", "value": 10**400, "error": 0.0, "tolerance": 0.0}),
        ("padding", {"dim": "length", "value": "0", "error": 0.0, "tolerance": 0.0}),
        ("padding", {"dim": "length", "value": 0, "error": -1.0, "tolerance": 0.0}),
        ("padding", {"dim": "length", "value": 0}),
        ("padding", True),
        ("choices", {"m": {**CHOICE, "options": {"spin": float("nan")}}}),
        ("choices", {"m": {**CHOICE, "options": {"fixed_rows": [1, float("inf")]}}}),
        ("int_below", 0),
        ("int_below", 1.5),
        ("int_below", "4096"),
        ("int_below", 2**64),
    ],
)
def test_a_bad_field_is_named(path: str, value: object) -> None:
    with pytest.raises(RepositoryError) as e:
        parse(changed(path, value))
    assert e.value.code == "CORRUPT_MANIFEST"
    assert e.value.where == "file"
    # a rule that spans fields is reported at the object that holds them
    assert path.split(".")[0] in e.value.message


def test_what_a_block_promises_is_part_of_it() -> None:
    form = {"dim": "length", "value": -1, "error": 1e-7, "tolerance": 1e-4}
    manifest = parse({**VALID, "padding": form})
    assert manifest.to_info().padding == Padding("length", -1)
    assert parse_manifest(manifest.to_json(), where="file", folder="trunk1") == manifest
    assert parse(VALID).to_info().padding is None


def test_the_bound_of_integers_is_told_where_it_is_known() -> None:
    manifest = parse({**VALID, "int_below": 4096})
    assert manifest.int_below == 4096
    assert parse_manifest(manifest.to_json(), where="file", folder="trunk1") == manifest
    assert parse(VALID).int_below is None and b"int_below" not in parse(VALID).to_json()


@pytest.mark.parametrize("field", ["name", "sha256", "contract", "created"])
def test_a_missing_field_is_named(field: str) -> None:
    data = {k: v for k, v in VALID.items() if k != field}
    with pytest.raises(RepositoryError, match=f"field {field}"):
        parse(data)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"name": "a"', b"NaN"],
)
def test_bytes_that_are_no_manifest(raw: bytes) -> None:
    with pytest.raises(RepositoryError) as e:
        parse_manifest(raw, where="file", folder="trunk1")
    assert e.value.code == "CORRUPT_MANIFEST"


def test_a_huge_manifest_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(RepositoryError, match="larger than"):
        parse_manifest(b" " * (MAX_MANIFEST_BYTES + 1), where="file", folder="trunk1")


def test_the_name_must_be_the_folders() -> None:
    with pytest.raises(RepositoryError, match="lies in the folder 'other'"):
        parse(VALID, folder="other")


@pytest.mark.parametrize(
    ("name", "good"),
    [("a", True), ("A1._-", True), ("", False), ("1a", False), ("a/b", False), ("..", False),
     ("a\n", False), ("a" * 64, True), ("a" * 65, False), ("ä", False)],
)  # fmt: skip
def test_block_names(name: str, good: bool) -> None:
    assert is_block_name(name) is good
