"""Branches: the blocks of a tree, as modules that follow one another.

Where a model only calls its named submodules, each with what another one gave, these are the
blocks, whatever Python the forward is. Where it does more in between, its graph tells what belongs
to which (:mod:`blockflow.repository.regions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, fx, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.record import record
from blockflow.repository.regions import regions
from blockflow.repository.sources import LoadedModel
from blockflow.repository.split import ancestors, cut_before, split_model, unreached
from blockflow.repository.trace import trace
from blockflow.repository.traced import Traced, Untraced
from blockflow.repository.tree import Observed, Unconnected, connected
from blockflow.repository.unfold import unfold, unfolds


@dataclass(frozen=True, slots=True)
class Branch:
    """One named block.

    Attributes:
        parent: the block that it follows; None: the model's input.
        stage: what it runs.
        label: the submodule that it is named for, with ``..`` where it does more before or after.
        within: what names of submodules begin with that are not ``stage``'s, but the model's.
        operators: whether ``stage`` is of operators, and no calls of submodules are left to cut.
    """

    parent: str | None
    stage: nn.Module
    label: str
    within: str = ""
    operators: bool = False

    def split(
        self, cuts: Sequence[str], spec: TensorSpec, tensors: Sequence[Tensor], format_: str
    ) -> Sequence[nn.Module]:
        """Cut the block before each submodule of ``cuts`` (their names in the model).

        Args:
            spec, tensors: what the block takes.

        Raises:
            ExportError: NOT_SPLITTABLE with the reason.
        """
        if self.operators and isinstance(self.stage, fx.GraphModule):
            return cut_before(record(self.stage, tensors), cuts)
        deeper = partial(unfold, self.stage, spec, tensors) if unfolds(format_) else None
        names = [cut.removeprefix(self.within) for cut in cuts]
        return split_model(self.stage, names, tensors, deeper)


def branches(
    loaded: LoadedModel,
    blocks: Mapping[str, str],
    examples: Sequence[Tensor],
    observed: Observed,
    format_: str,
) -> dict[str, Branch]:
    """The blocks of a tree.

    Args:
        blocks: block name -> submodule name.
        observed: what running the model on ``examples`` has shown of them.
        format_: of the artifacts.

    Raises:
        ExportError: NOT_SPLITTABLE with the reason.
    """
    model = loaded.module
    try:
        parents = connected(observed.calls, blocks)
    except Unconnected as e:
        return _of_graph(loaded, blocks, examples, observed, format_, e)
    return {
        name: Branch(parent, model.get_submodule(path), path, within=path + ".")
        for name, parent in parents.items()
        for path in [blocks[name]]
    }


def _of_graph(
    loaded: LoadedModel,
    blocks: Mapping[str, str],
    examples: Sequence[Tensor],
    observed: Observed,
    format_: str,
    unconnected: Unconnected,
) -> dict[str, Branch]:
    model = loaded.module
    calls = partial(trace, model, ancestors(blocks.values()), examples, several=True)
    ways: list[Callable[[], Traced]] = [calls]
    if unfolds(format_):
        ways.append(partial(unfold, model, loaded.input, examples, several=True))
    gave = {name: call.gave for name, call in observed.calls.items() if call.gave}
    refused: list[ExportError] = []
    for way in ways:
        try:
            found = regions(way(), blocks, gave)
        except ExportError as e:
            refused.append(e)
            continue
        return {
            name: Branch(
                region.parent,
                region.stage,
                ".." * region.begins + blocks[name] + ".." * region.ends,
                operators=way is not calls,
            )
            for name, region in found.items()
        }
    reason = unreached(refused)
    if isinstance(reason, Untraced):
        unconnected.message += f"; {reason.message}"
        reason = unconnected
    raise reason from unconnected
