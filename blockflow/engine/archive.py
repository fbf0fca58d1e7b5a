"""Archive: which records a file of an exported program (``.pt2``) may have.

torch's loader goes by the names of records, and its reader finds them without regard to case; it
unpickles what a table marks so. What is checked here is therefore what that reader finds, by that
reader, wherever torch is to read the file. Format: ``torch/csrc/export/pt2_archive_constants.h``
of the PyTorch sources.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from blockflow.engine.targets import PickledProgram, RefusedProgram
from blockflow.engine.vetting import vet

MOST_JSON = 256 << 20

_RECORD = re.compile(
    r"models/(?P<model>[\w.\-]+)\.json"
    r"|data/(?P<kind>weights|constants)/(?P<part>[\w.\-]+)"
    r"|data/sample_inputs/[\w.\-]+|extra/[\w.\-/ ]+"
    r"|archive_format|archive_version|version|byteorder|\.data/[\w.\-]+",
    re.ASCII,
)
"""What an archive of a program holds, under its top folder. Others are of older formats, which
torch loads as pickles, or bring native code."""

_TENSOR = re.compile(r"(?:weight|tensor)_[0-9]+")
"""Records that torch reads as tensors; by other names it unpickles, whatever the table says."""


def refuse_code(file: BinaryIO) -> None:
    """Check an archive that ``torch.export.load`` shall read.

    Raises:
        RefusedProgram, zipfile.BadZipFile, ValueError: it shall not.
    """
    with zipfile.ZipFile(file) as archive:
        refuse_pickles(archive)
        names = archive.namelist()
    file.seek(0)
    # The very reader of torch's loader: two that disagree would have two contents for one file.
    reader = torch._C.PyTorchFileReader(file)
    top = names[0].partition("/")[0] if names else ""
    records = reader.get_all_records()
    if sorted(f"{top}/{record}" for record in records) != sorted(names):
        raise RefusedProgram("two readers find different records")
    _refuse_records(records, lambda record: json.loads(reader.get_record(record)))
    for record in records:
        if record.startswith("models/"):
            vet(json.loads(reader.get_record(record)))
        elif record.startswith("data/sample_inputs/") and (data := reader.get_record(record)):
            try:  # where this fails, torch.export.load tries again without weights_only
                torch.load(io.BytesIO(data), weights_only=True)
            except Exception as e:
                raise PickledProgram(f"its sample inputs {record!r} hold objects") from e


def refuse_pickles(archive: zipfile.ZipFile, most_json: int = MOST_JSON) -> None:
    """Check the records of an archive that :mod:`blockflow.engine.program` shall read.

    Args:
        archive: the file.
        most_json: bytes of a record of text.

    Raises:
        RefusedProgram, ValueError: it shall not.
    """
    names = archive.namelist()
    top = names[0].partition("/")[0] + "/" if names else ""
    if len({name.casefold() for name in names}) < len(names):
        raise PickledProgram("two records of one name: one may be looked at, and the other loaded")
    if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
        raise RefusedProgram("compressed records, which no export writes")
    for name in names:
        if not name.startswith(top):
            raise PickledProgram(f"{name[:80]!r} is no record of an exported program")
    _refuse_records(
        [name.removeprefix(top) for name in names],
        lambda record: json_of(archive, top + record, most_json),
    )


def json_of(archive: zipfile.ZipFile, name: str, most: int = MOST_JSON) -> Any:
    """A record of text.

    Raises:
        ValueError: it is larger than ``most`` bytes, or no JSON.
        KeyError: there is none.
    """
    if archive.getinfo(name).file_size > most:
        raise ValueError(f"record {name!r} is larger than {most} bytes")
    return json.loads(archive.read(name))


def _refuse_records(records: list[str], table: Callable[[str], Any]) -> None:
    """By what torch goes by: the names of records, not only what the tables say of them."""
    found = {record: _RECORD.fullmatch(record) for record in records}
    for record, match in found.items():
        if match is None:
            raise PickledProgram(f"{record[:80]!r} is no record of an exported program")
    models = [match["model"] for match in found.values() if match and match["model"]]
    for record, match in found.items():
        if match is None or match["kind"] is None or _TENSOR.fullmatch(match["part"]):
            continue
        if record.endswith(".pt"):
            raise PickledProgram(f"{record!r} is one pickle (a format before torch 2.9)")
        if match["part"] not in {f"{model}_{match['kind']}_config.json" for model in models}:
            if not re.fullmatch(r"(?:opaque|custom)_obj_[0-9]+", match["part"]):
                raise PickledProgram(f"{record[:80]!r} is no record of an exported program")
            raise PickledProgram(f"{record!r} is a pickled object")
        try:
            entries = [
                (key, str(entry["path_name"]), entry["use_pickle"], entry["tensor_meta"])
                for key, entry in table(record)["config"].items()
            ]
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{record!r} is no table of tensors: {e}") from e
        for key, path, pickled, meta in entries:
            if not _TENSOR.fullmatch(path) or pickled is not False or meta is None:
                raise PickledProgram(f"{key!r} is a pickled object")
