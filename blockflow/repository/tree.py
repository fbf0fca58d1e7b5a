"""Tree: how the named submodules of a model connect, observed while the model runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.text import a_kind
from blockflow.repository.record import Seen, same_elements, tensors_of
from blockflow.repository.sources import LoadedModel, model_errors


@dataclass(slots=True)
class Call:
    """One submodule's calls, one per example.

    Attributes:
        inputs: as they were when it was called.
        outputs: as they were when it returned.
        sources: the model's input of that run.
        odd: what else than one tensor it was called with; '' = nothing.
        gave: what else than one tensor it returned; '' = nothing.
        order: the names of the blocks in the order in which they returned, of all runs.
        runs: how often it was called.
    """

    order: list[str]
    inputs: list[Seen] = field(default_factory=list)
    outputs: list[Seen] = field(default_factory=list)
    sources: list[Seen] = field(default_factory=list)
    odd: str = ""
    gave: str = ""
    runs: int = 0

    @property
    def gives(self) -> list[Tensor]:
        return [seen.copy for seen in self.outputs]


@dataclass(frozen=True, slots=True)
class Observed:
    """What running a model has shown.

    Attributes:
        calls: by block.
        returned: per example, the tensors in what the model returned.
    """

    calls: dict[str, Call]
    returned: list[list[Tensor]]

    def ends_early(self, block: str) -> bool:
        """Whether the model goes on after ``block``, or drops what it gives: it returns something
        else. A return value without tensors that are found says nothing."""
        given = self.calls[block].gives
        return any(
            tensors and not any(same_elements(out, t) for t in tensors)
            for out, tensors in zip(given, self.returned, strict=True)
        )


def observe(loaded: LoadedModel, blocks: Mapping[str, str], examples: Sequence[Tensor]) -> Observed:
    """Run the model and note what each named submodule takes and gives, and what it returns.

    Args:
        blocks: block name -> submodule name.
        examples: inputs of the model; they are left as they are.

    Raises:
        ExportError: NOT_SPLITTABLE when a submodule does not run just once per example;
            EXPORT_FAILED when the model fails.
    """
    model = loaded.module
    known = dict(model.named_modules(remove_duplicate=False))
    order: list[str] = []
    calls = {name: Call(order) for name in blocks}
    hooks = []
    returned: list[list[Tensor]] = []
    for name, path in blocks.items():
        if path not in known or not path:
            raise ExportError(
                "NOT_SPLITTABLE",
                f"the model has no submodule {path!r}",
                where=name,
                hint=f"top-level submodules: {', '.join(n for n, _ in model.named_children())}",
            )
        hooks += _watch(known[path], name, calls[name])
    try:
        for example in examples:
            source = example.clone()
            for call in calls.values():
                call.sources.append(Seen.now(source))
            with torch.no_grad(), model_errors(loaded, example):
                returned.append([t.clone() for t in tensors_of(model(source))])
    finally:
        for hook in hooks:
            hook.remove()
    for name, call in calls.items():
        if call.runs != len(examples):
            raise ExportError(
                "NOT_SPLITTABLE",
                f"submodule {blocks[name]!r} runs {call.runs / len(examples):g} times per input; "
                "a block runs once",
                where=name,
                hint=_instead(blocks[name], known[blocks[name]], call.runs),
            )
    return Observed(calls, returned)


def _instead(path: str, module: nn.Module, runs: int) -> str:
    """What to name where a submodule does not run once."""
    if runs:
        return (
            "leave it without a name, and what it does goes into the blocks around it; or call it "
            "in one submodule, and name that"
        )
    inner = [f"{path}.{name}" for name, _ in module.named_children()]
    if inner:
        return f"a list, or what is not called itself, has parts that are: NAME={inner[-1]}, say"
    return "the forward does not call it"


def _watch(module: nn.Module, name: str, call: Call) -> list[Any]:
    autocast = torch.is_autocast_enabled("cpu")

    def before(_m: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        call.runs += 1
        if torch.is_autocast_enabled("cpu") is not autocast:
            call.odd = "is called under the model's torch.autocast"  # it alone would compute else
        elif named:
            call.odd = f"is called with {', '.join(named)} by keyword"
        elif len(args) != 1:
            call.odd = f"is called with {len(args)} arguments"
        elif not isinstance(args[0], Tensor):
            call.odd = f"is called with {a_kind(args[0])}"
        else:
            call.inputs.append(Seen.now(args[0]))

    def after(_m: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, Tensor):
            call.outputs.append(Seen.now(out))
            call.order.append(name)
        else:
            call.gave = f"returns {a_kind(out)}"

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]


class Unconnected(ExportError):
    """The model does something besides to call its blocks, each with what another one gave."""


def connected(calls: Mapping[str, Call], blocks: Mapping[str, str]) -> dict[str, str | None]:
    """Each block's parent: the block whose output tensor it takes; None takes the model's input.

    Raises:
        Unconnected: NOT_SPLITTABLE when it is called with anything but one tensor, with another
            tensor, or one that was written to, or gives anything but one.
    """
    for name, call in calls.items():
        if odd := call.odd or call.gave:
            raise Unconnected(
                "NOT_SPLITTABLE",
                f"submodule {blocks[name]!r} {odd}; a block takes one tensor and gives one",
                where=name,
                hint="change the call in the model's forward, or wrap both in a submodule and name "
                "that",
            )
    return {name: _parent(name, call, calls) for name, call in calls.items()}


def _parent(name: str, call: Call, calls: Mapping[str, Call]) -> str | None:
    taken = call.inputs[0]
    earlier = call.order[: call.order.index(name)]
    # the latest: a block may give on the very tensor that it took
    for other in reversed(earlier):
        if calls[other].outputs[0].tensor is taken.tensor:
            _refuse_written(calls[other].outputs[0], taken, f"the output of block {other!r}", name)
            return other
    if taken.tensor is call.sources[0].tensor:
        _refuse_written(call.sources[0], taken, "its input", name)
        return None
    raise Unconnected(
        "NOT_SPLITTABLE",
        f"the input of block {name!r} is neither the model's input nor another block's output",
        where=name,
        hint="the model computes something in between: move it into a submodule and name that",
    )


def _refuse_written(given: Seen, taken: Seen, what: str, name: str) -> None:
    if given.became(taken):
        raise Unconnected(
            "NOT_SPLITTABLE",
            f"the model writes into {what} before block {name!r}",
            where=name,
            hint="an in-place operation (relu_, ReLU(inplace=True), +=) stands between: move it "
            "into a submodule and name that, or let it make a new tensor",
        )


def in_order(parents: Mapping[str, str | None]) -> list[str]:
    """Parents before children."""
    order: list[str] = []
    while len(order) < len(parents):
        order += [n for n, p in parents.items() if n not in order and (p is None or p in order)]
    return order


def paths_of(parents: Mapping[str, str | None]) -> list[list[str]]:
    """From the first block to each block that no other follows."""
    paths: list[list[str]] = []
    for name in parents:
        if name in parents.values():
            continue
        path: list[str] = []
        at: str | None = name
        while at is not None:
            path.insert(0, at)
            at = parents[at]
        paths.append(path)
    return paths
