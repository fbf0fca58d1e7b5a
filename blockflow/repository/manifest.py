"""Manifest: the ``manifest.json`` of a block's folder, checked field by field.

A manifest says what the artifact is (format, sha256, size), what it takes and gives (contract) and
where it comes from (source, chain, tools); which further forms of the artifact there are (variants)
and which engine is best where (choices). Everything that reads one gets either a valid manifest or
``RepositoryError("CORRUPT_MANIFEST")`` that names the file and the field.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from blockflow.core.engines import files_of
from blockflow.core.errors import RepositoryError
from blockflow.core.limits import NAME_PATTERN, VERSION_CHARS
from blockflow.core.model import BlockInfo, Contract, Padding, TensorSpec, Variant

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 256 * 1024
MAX_COUNT = 2**53
"""What every reader of JSON takes for a whole number."""

_MAX_TEXT = 4096
ARTIFACT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"
_NAME = re.compile(NAME_PATTERN)
_VERSION = re.compile(VERSION_CHARS)

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Text = Annotated[str, Field(max_length=_MAX_TEXT)]
Kind = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
Machine = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TensorForm(_Strict):
    """JSON form of :class:`~blockflow.core.model.TensorSpec`."""

    dtype: str
    dims: list[int | str]
    ranges: dict[str, tuple[int, int]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _valid(self) -> TensorForm:
        self.to_spec()
        return self

    def to_spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, tuple(self.dims), dict(self.ranges))


class ContractForm(_Strict):
    """JSON form of :class:`~blockflow.core.model.Contract`."""

    input: TensorForm
    output: TensorForm

    @model_validator(mode="after")
    def _valid(self) -> ContractForm:
        self.to_contract()
        return self

    def to_contract(self) -> Contract:
        return Contract(self.input.to_spec(), self.output.to_spec())


class Measured(_Strict):
    """What the export measured on the maker's machine: a hint, not a profile.

    ``ms`` is the median time of one row on one thread; ``output_bytes`` is the size of one output
    row (with the largest value of each dynamic dim), or MAX_COUNT where it is more.
    """

    ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    output_bytes: Count


class Source(_Strict):
    """Where the block was cut from."""

    model: Text
    part: Text = ""
    weights_sha256: Digest | None = None
    seed: int | None = None


class Chain(_Strict):
    """The block's place in the path that equals the model; heads of a tree share ``position``."""

    model: Text
    position: Annotated[int, Field(ge=1)]
    of: Annotated[int, Field(ge=1)]


class PaddingForm(_Strict):
    """JSON form of :class:`~blockflow.core.model.Padding`, and how well it has held.

    ``error`` is the largest difference that padding made to a result, ``tolerance`` what was
    allowed, both as a part of the largest value of the result (docs/blocks.md).
    """

    dim: Text
    value: Annotated[float, Field(allow_inf_nan=False)] | int = 0
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    def to_padding(self) -> Padding:
        return Padding(self.dim, self.value)


class VerdictForm(_Strict):
    """How one engine did when a variant was made: it may run it unless ``refused`` says why not.

    ``error`` is the largest difference seen, as a part of the largest reference value; None where
    there is none to tell: the engine fails, or its result is not finite.
    """

    error: Annotated[float | None, Field(ge=0, allow_inf_nan=False)] = None
    refused: Text = ""


class VariantForm(_Strict):
    """JSON form of :class:`~blockflow.core.model.Variant`, and how well it equals the artifact.

    ``error`` is the largest of those engines that may run it, ``tolerance`` what was allowed.
    ``engines`` has the verdicts on those that were there; one without may run it unseen.
    """

    file: Annotated[str, Field(pattern=ARTIFACT_PATTERN)]
    digest: Digest
    bytes: Count
    machine: Annotated[str, Field(max_length=128)] = ""
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    calibration: Text = ""
    tools: dict[str, str] = Field(default_factory=dict)
    created: str
    engines: dict[Name, VerdictForm] = Field(default_factory=dict)

    def to_variant(self) -> Variant:
        refused = {name: v.refused for name, v in self.engines.items() if v.refused}
        return Variant(self.file, self.digest, self.bytes, self.machine, refused)


class Choice(_Strict):
    """What ``engine: auto`` means on one machine, and what was measured when it was chosen."""

    engine: Annotated[Name, Field(description="what computes")]
    precision: Annotated[Name, Field(description="what it computes in")]
    options: Annotated[dict[str, Any], Field(description="the engine's options")] = Field(
        default_factory=dict
    )
    ms: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="its median time per row, ms")
    ]
    reference_ms: Annotated[
        float,
        Field(ge=0, allow_inf_nan=False, description="that of the artifact's own engine at fp32"),
    ]
    error: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="largest difference seen, as a part of the largest reference value",
        ),
    ]
    tolerance: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="the difference that was allowed")
    ]
    when: Annotated[str, Field(description="UTC, ISO 8601")]

    def holds(self, machine: str, form: VariantForm) -> bool:
        """Whether ``form`` can be loaded on the choice's ``machine`` and was found as exact as the
        choice has to be."""
        seen = form.engines.get(self.engine)
        error = form.error if seen is None else seen.error
        return form.machine in ("", machine) and error is not None and error <= self.tolerance

    @field_validator("options")
    @classmethod
    def _finite(cls, value: dict[str, Any]) -> dict[str, Any]:
        json.dumps(value, allow_nan=False)  # as wherever they are told
        return value


class Manifest(_Strict):
    """One block. ``version`` is the maker's label; ``sha256`` is what identifies the artifact.

    ``int_below`` bounds the integers that the block was exported for (a vocabulary's size): example
    inputs are drawn from 0 .. int_below - 1. None: nobody has said, or it takes no integers.
    """

    schema_version: Literal[1] = 1
    name: Name
    version: Annotated[str, Field(pattern=rf"^{VERSION_CHARS}$")]
    format: Kind
    artifact: Annotated[str, Field(pattern=ARTIFACT_PATTERN)]
    sha256: Digest
    size: Count
    contract: ContractForm
    parameters: Count
    state_bytes: Count
    measured: Measured | None = None
    source: Source | None = None
    chain: Chain | None = None
    tools: dict[str, str] = Field(default_factory=dict)
    created: str
    variants: dict[Kind, VariantForm] = Field(default_factory=dict)
    choices: dict[Machine, Choice] = Field(default_factory=dict)
    padding: PaddingForm | None = None
    int_below: Annotated[int, Field(ge=1, le=2**63)] | None = None

    @model_validator(mode="after")
    def _files(self) -> Manifest:
        if MANIFEST_NAME in self.files:
            raise ValueError(f"an artifact cannot be {MANIFEST_NAME} itself")
        return self

    @model_validator(mode="after")
    def _padded(self) -> Manifest:
        if self.padding is not None:
            problem = self.padding.to_padding().problem(self.contract.input.to_spec())
            if problem:
                raise ValueError(f"padding: {problem}")
        return self

    @property
    def files(self) -> list[str]:
        """Names of all files that the manifest pins."""
        return [self.artifact, *(v.file for v in self.variants.values())]

    def digest_of(self, variant: str | None) -> str | None:
        """sha256 of the artifact or of a variant; None where there is no such variant."""
        if variant is None:
            return self.sha256
        form = self.variants.get(variant)
        return form.digest if form is not None else None

    def with_choice(self, machine: str, choice: Choice, measured: BlockInfo) -> Manifest | None:
        """This manifest with what was chosen for ``machine`` among the files that ``measured`` has;
        None where the block, or a file that the choice loads, is another one by now, and the choice
        need not hold for that."""
        if self.sha256 != measured.digest:
            return None
        for kind in files_of(choice.engine, choice.precision):
            known, now = measured.variants.get(kind), self.variants.get(kind)
            if known is None or (now is not None and now.digest == known.digest):
                continue
            if now is None or not choice.holds(machine, now):
                return None
        return self.model_copy(update={"choices": {**self.choices, machine: choice}})

    def with_variant(self, kind: str, form: VariantForm) -> Manifest:
        """This manifest with another form of the artifact, and without the choices that were
        measured with another file of that kind and do not hold for this one."""
        known = self.variants.get(kind)
        other = known is not None and known.digest != form.digest
        choices = {
            m: c
            for m, c in self.choices.items()
            if not other or kind not in files_of(c.engine, c.precision) or c.holds(m, form)
        }
        variants = {**self.variants, kind: form}
        return self.model_copy(update={"variants": variants, "choices": choices})

    @field_validator("created")
    @classmethod
    def _created(cls, value: str) -> str:
        if datetime.fromisoformat(value).tzinfo is None:
            raise ValueError("the time has no zone; write UTC")
        return value

    def to_info(self) -> BlockInfo:
        """The manifest's essence, as the rest of the system sees it."""
        return BlockInfo(
            name=self.name,
            version=self.version,
            digest=self.sha256,
            format=self.format,
            contract=self.contract.to_contract(),
            parameters=self.parameters,
            state_bytes=self.state_bytes,
            variants={k: v.to_variant() for k, v in self.variants.items()},
            choices={m: c.model_dump(mode="json") for m, c in self.choices.items()},
            padding=None if self.padding is None else self.padding.to_padding(),
            int_below=self.int_below,
        )

    def to_json(self) -> bytes:
        """Indented JSON, ending in a newline.

        Raises:
            RepositoryError: REPOSITORY_UNUSABLE: it is larger than what is read again.
        """
        raw = (self.model_dump_json(indent=2, exclude_none=True) + "\n").encode()
        if len(raw) > MAX_MANIFEST_BYTES:
            raise RepositoryError(
                "REPOSITORY_UNUSABLE",
                f"the manifest would have {len(raw)} bytes, and none of more than "
                f"{MAX_MANIFEST_BYTES} is read",
                where=self.name,
                hint="export the block again: that leaves out what other machines have chosen",
            )
        return raw


def as_text(label: str) -> str:
    """``label``, whatever its maker has called something, as a manifest's text takes it: what UTF-8
    cannot tell as Python writes it (``\\udcff``), and its beginning where it is long."""
    told = label.encode(errors="backslashreplace").decode()
    return told if len(told) <= _MAX_TEXT else told[: _MAX_TEXT - 3] + "..."


def new_manifest(name: str, format: str, contract: Contract, **more: Any) -> Manifest:
    """Of an artifact that is to be saved: its file's name, digest and size are found then. ``more``
    are further fields."""
    return Manifest(
        name=name,
        format=format,
        artifact="unset",
        sha256="0" * 64,
        size=0,
        contract=contract_form(contract),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        **{"version": "1", "parameters": 0, "state_bytes": 0, **more},
    )


def contract_form(contract: Contract) -> ContractForm:
    """Inverse of :meth:`ContractForm.to_contract`."""

    def form(spec: TensorSpec) -> TensorForm:
        return TensorForm(dtype=spec.dtype, dims=list(spec.dims), ranges=dict(spec.ranges))

    return ContractForm(input=form(contract.input), output=form(contract.output))


def parse_manifest(raw: bytes, *, where: str, folder: str | None) -> Manifest:
    """Check the bytes of a manifest found in ``folder`` (None: whatever block it is of).

    Raises:
        RepositoryError: CORRUPT_MANIFEST with the file, the first bad field and all of them in
            ``details["fields"]``.
    """

    def corrupt(
        message: str,
        details: dict[str, Any] | None = None,
        hint: str = "export the block again, with --force",
    ) -> RepositoryError:
        return RepositoryError("CORRUPT_MANIFEST", message, where=where, hint=hint, details=details)

    if len(raw) > MAX_MANIFEST_BYTES:
        raise corrupt(f"the manifest is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as e:
        fields = [
            {"field": ".".join(str(p) for p in err["loc"]) or "(whole file)", "problem": err["msg"]}
            for err in e.errors(include_url=False, include_input=False)[:20]
        ]
        first = fields[0]
        said, details = f"field {first['field']}: {first['problem']}", {"fields": fields}
        if any(field["field"] == "schema_version" for field in fields):
            # whatever else it says, it is not damaged: an export would take a sound block's place
            raise corrupt(
                f"another version of BlockFlow has written it: {said}",
                details,
                "read it with the version that wrote it, or a later one; or export the block "
                "again, with --force",
            ) from None
        raise corrupt(said, details) from None
    except RecursionError:
        raise corrupt("the JSON is nested too deeply") from None
    if folder is not None and manifest.name != folder:
        raise corrupt(f"field name: {manifest.name!r} lies in the folder {folder!r}")
    return manifest


def is_block_name(name: str) -> bool:
    """Whether ``name`` can name a block (and so its folder)."""
    # fullmatch: "$" alone would let a trailing newline through
    return _NAME.fullmatch(name) is not None


def is_version(text: str) -> bool:
    """Whether ``text`` can be a block's version."""
    return _VERSION.fullmatch(text) is not None
