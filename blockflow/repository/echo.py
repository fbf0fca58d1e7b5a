"""Echo blocks: artifacts without a model, so that tests and docs have blocks without torch.

The artifact is a small JSON file; the engine returns its input after an optional delay, or fails on
purpose. See :mod:`blockflow.engine.echo` for what each setting does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blockflow.core.model import BlockInfo, Contract, Padding, TensorSpec
from blockflow.repository.manifest import PaddingForm, Source, new_manifest
from blockflow.repository.repository import BlockRepository

ECHO_FORMAT = "echo"


def save_echo(
    repository: BlockRepository,
    name: str,
    spec: TensorSpec | Contract,
    *,
    settings: Mapping[str, Any] | None = None,
    version: str = "1",
    padding: Padding | None = None,
) -> BlockInfo:
    """Store an echo block.

    Args:
        repository: where to.
        name: the block's name.
        spec: input and output at once, or both: what it gives is its input's bytes all the same.
        settings: ``delay_ms``, ``row_ms``, ``fail_on_value``, ``crash_on_value``.
        version: the label.
        padding: how it may be padded; an echo keeps that promise by itself.
    """
    artifact = json.dumps(dict(settings or {}), sort_keys=True).encode()
    manifest = new_manifest(
        name,
        ECHO_FORMAT,
        spec if isinstance(spec, Contract) else Contract(spec, spec),
        version=version,
        source=Source(model="echo"),
        padding=None
        if padding is None
        else PaddingForm(dim=padding.dim, value=padding.value, error=0, tolerance=0),
    )
    return repository.save(manifest, artifact)
