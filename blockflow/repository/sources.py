"""LoadedModel: a model ready to be exported, from the zoo or from ``module:factory``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from blockflow.core.errors import BlockFlowError, ExportError
from blockflow.core.guess import Guesses
from blockflow.core.model import Padding, TensorSpec
from blockflow.core.scarcity import no_room
from blockflow.core.text import a_kind
from blockflow.repository.causes import of_computed_weights
from blockflow.repository.probe import told_of
from blockflow.repository.weights import load_weights
from blockflow.repository.zoo.catalog import ZOO

_SHOWN = 5
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FLAT = "put modules that run one after another side by side into one nn.Sequential"
_LONE_ROW = "more than 1 value per channel"
"""What a batch norm that takes the batch's statistics says of one row."""

_INSTALLED = "is it installed, or in this folder?"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode with the contract of its input.

    Attributes:
        module: takes one tensor that fits ``input``.
        label: how the user named it; goes into manifests.
        input: the input contract.
        seed: of the initialisation; None when weights were loaded.
        weights_sha256: digest of the weights file, if one was loaded.
        int_below: integer example inputs are drawn from 0 .. int_below - 1; None: from what is
            usual for their dtype.
        padding: how its input may be padded without a change of any result; None: it may not.
    """

    module: nn.Module
    label: str
    input: TensorSpec
    seed: int | None = None
    weights_sha256: str | None = None
    int_below: int | None = None
    padding: Padding | None = None

    def outside_inference(self) -> LoadedModel:
        """The same with ordinary tensors: those made in ``torch.inference_mode()`` know neither
        versions nor gradients, which torch's exporters ask for. Such a model is copied.

        Raises:
            ExportError: EXPORT_FAILED: it cannot be copied; FACTORY_FAILED: it is not finished, or
                nested too deeply.
        """
        with _nested_modules(self.label):
            _refuse_unfinished(self.module, self.label)
            state = (*self.module.parameters(), *self.module.buffers())
        if not any(t.is_inference() for t in state):
            return self
        plain = {id(t): _plain(t) for t in state}
        try:
            return replace(self, module=copy.deepcopy(self.module, dict[int, Any](plain)))
        except Exception as e:  # a model may hold anything
            raise ExportError(
                "EXPORT_FAILED",
                "the model was made in torch.inference_mode() and cannot be copied out of it: "
                f"{type(e).__name__}: {str(e)[:200]}",
                where=self.label,
                hint="build it outside, or under torch.no_grad()",
            ) from e


def _plain(tensor: Tensor) -> Tensor:
    if not tensor.is_inference():
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.clone(), requires_grad=False)
    return tensor.clone()


def load_model(
    ref: str,
    *,
    arguments: Mapping[str, Any] | None = None,
    weights: Path | None = None,
    input_spec: TensorSpec | None = None,
    seed: int = 0,
    int_below: int | None = None,
    padding: Padding | None = None,
) -> LoadedModel:
    """Build a model and load its weights.

    Args:
        ref: a zoo name or ``module:factory``.
        arguments: keyword arguments of the factory.
        weights: ``.safetensors``, or ``.pt``/``.pth`` holding a state dict.
        input_spec: the input contract; required for models outside the zoo.
        seed: of the random initialisation; the caller's generator is left as it was.
        int_below: see :class:`LoadedModel`.
        padding: see :class:`LoadedModel`; None takes the zoo's, where it has one.

    Raises:
        ExportError: FACTORY_FAILED or WEIGHTS_INVALID; EXPORT_FAILED for an unknown input, or one
            that cannot be padded like this.
    """
    zoo = ZOO.get(ref)
    if zoo is None and ":" not in ref:
        raise ExportError(
            "FACTORY_FAILED",
            f"{ref!r} is neither a zoo model nor module:factory",
            hint=Guesses(ZOO).hint(ref) or f"zoo: {', '.join(ZOO)}",
        )
    spec = input_spec or (zoo.input if zoo else None)
    if spec is None:
        raise ExportError(
            "EXPORT_FAILED",
            f"the input of {ref!r} is not known",
            hint="give it, for example: --input float32[rows,3,224,224]",
        )
    if padding is not None:
        problem = padding.problem(spec)
        if problem:
            raise ExportError(
                "EXPORT_FAILED", problem, where=ref, hint="padding: see docs/blocks.md"
            )
    elif zoo is not None and zoo.padding is not None and not zoo.padding.problem(spec):
        padding = zoo.padding
    if not -(2**63) <= seed < 2**64:  # or the factory would be blamed
        raise ExportError("EXPORT_FAILED", f"{seed} is no seed", hint="64 bits hold what is one")
    with _nested_modules(ref):
        module = build(zoo.factory if zoo else ref, arguments or {}, seed)
        _refuse_unfinished(module, ref)
        digest = load_weights(module, weights) if weights else None
        module = _in_eval(module)
        _settle_weights(module)
        for parameter in module.parameters():  # of a scripted one, which has no requires_grad_()
            parameter.requires_grad = False
    return LoadedModel(
        module,
        ref,
        spec,
        None if weights else seed,
        digest,
        int_below or (zoo.int_below if zoo else None),
        padding,
    )


@contextmanager
def _nested_modules(label: str) -> Iterator[None]:
    """Who looks at all modules of a model goes as deep as they are nested."""
    try:
        yield
    except RecursionError as e:
        why = "its modules are nested more deeply than Python's stack goes"
        raise ExportError("FACTORY_FAILED", why, where=label, hint=_FLAT) from e


@contextmanager
def model_errors(loaded: LoadedModel, x: Tensor) -> Iterator[None]:
    """Tell of a failure of the model itself, run on ``x``, as EXPORT_FAILED with its reason; as
    NO_SPACE where it is for want of memory."""
    try:
        yield
    except BlockFlowError:
        raise
    except (Exception, SystemExit) as e:  # the model is the user's code, which may raise anything
        told = (
            f"the model fails on {loaded.input} (tried {list(x.shape)}): "
            f"{type(e).__name__}: {str(e)[:300]}"
        )
        raise no_room(e, told, loaded.label) or ExportError(
            "EXPORT_FAILED",
            told,
            where=loaded.label,
            hint=(_FLAT if isinstance(e, RecursionError) else "")
            or in_train_mode(loaded.module)
            or (batch_norms(loaded.module) if _LONE_ROW in str(e) else "")
            or _out_of_a_table(e, x)
            or of_computed_weights(e)
            or "check --input and --range against the model's forward, which has to take one "
            "tensor of any number of rows",
        ) from e


def _out_of_a_table(e: BaseException, x: Tensor) -> str:
    """A hint where ``x`` probably holds an index that the model has no entry for; else ''."""
    if not isinstance(e, IndexError) or not x.numel():
        return ""
    if x.is_floating_point():
        return told_of(x) + ": indices that are made of them need a clamp() in the model"
    return told_of(x) + ": they have to be indices that the model has an entry for"


def in_train_mode(module: nn.Module) -> str:
    """A hint if parts of ``module`` train: dropout draws, normalisation mixes rows; else ''."""
    if isinstance(module, torch.fx.GraphModule):  # as torch.export gives it: the flag says nothing
        return ""
    names = [name for name, part in module.named_modules() if part.training]
    if not names:
        return ""
    which = "it is" if not names[0] else f"{', '.join(names[:_SHOWN])}:"
    return f"{which} in train mode: call eval() before the export"


def batch_norms(module: nn.Module) -> str:
    """A hint if parts of ``module`` normalise over the batch in eval mode as well; else ''."""
    parts = module.named_modules()
    names = [n for n, p in parts if isinstance(p, _BATCH_NORMS) and p.running_mean is None]
    if not names:
        return ""
    return (
        f"{', '.join(names[:_SHOWN]) or 'it'}: a batch norm without running statistics takes those "
        "of the batch, in eval mode too: train it with track_running_stats=True, or take a norm "
        "within each row (GroupNorm, LayerNorm, InstanceNorm)"
    )


def scripted_part(stage: nn.Module) -> str:
    """A hint if ``stage`` is scripted, or holds what is; else ''."""
    names = [n for n, m in stage.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if not names:
        return ""
    return (
        f"{names[0] or 'it'} is scripted, which torch.export does not follow: build the model "
        "without torch.jit.script, or export it with --format torchscript-scripted"
    )


def build(factory: str, arguments: Mapping[str, Any], seed: int) -> nn.Module:
    """Import ``module:factory`` and call it under a fixed seed; wrappers of torch.compile and
    DataParallel are taken off what it returns, and nothing in it is compiled when it runs. The
    current folder stays what it was: paths that the user gave are meant from there.

    Raises:
        ExportError: FACTORY_FAILED with the factory's own reason.
    """

    def failed(why: str, hint: str = "") -> ExportError:
        return ExportError("FACTORY_FAILED", why, where=factory, hint=hint)

    module_name, _, attribute = factory.partition(":")
    try:
        with chdir("."):  # the code of others may go elsewhere
            made: Any = import_module(module_name)
    except (Exception, SystemExit) as e:  # an import runs the user's code, which may raise anything
        hint = ""
        if module_name.endswith(".py"):
            right = f"{Path(module_name).stem}:{attribute}"
            hint = f"name the module, not its file: {right}, in the folder of the file"
        if isinstance(e, ModuleNotFoundError):
            why = f"no module {e.name!r}"
            raise failed(why, hint or _INSTALLED) from e
        raise failed(f"the import failed: {type(e).__name__}: {e}", hint) from e
    try:
        for part in attribute.split("."):
            made = getattr(made, part)
    except AttributeError as e:
        hint = Guesses(dir(made)).hint(part)
        raise failed(f"module {module_name!r} has no {attribute!r}", hint) from e
    if not callable(made) or isinstance(made, nn.Module):  # a model is called with its input
        hint = "write a function that returns it" if isinstance(made, nn.Module) else ""
        raise failed(f"{attribute!r} is {a_kind(made)}, not a function or class", hint)
    try:
        with torch.random.fork_rng(devices=[]), chdir("."):
            torch.manual_seed(seed)
            model = made(**arguments)
    except (Exception, SystemExit) as e:
        hint = _INSTALLED if isinstance(e, ModuleNotFoundError) else "check its arguments"
        raise failed(f"the factory raised {type(e).__name__}: {e}", hint) from e
    if not isinstance(model, nn.Module):
        why = f"the factory returned {a_kind(model)}, not a torch.nn.Module"
        raise failed(why, "write a function that calls it and returns the model alone")
    model = _unwrapped(model)
    for module in model.modules():
        _run_uncompiled(module)
    return model


def _run_uncompiled(module: nn.Module) -> None:
    """The export needs nothing of what torch.compile would make in the first runs of ``module``,
    for each of their dims anew. Names inside stay what they are."""
    if getattr(module, "_compiled_call_impl", None) is not None:  # by module.compile()
        module._compiled_call_impl = None
    if type(module).__module__.startswith("torch._dynamo"):
        inner: Any = module._orig_mod
        module.forward = inner.__call__


def _refuse_unfinished(module: nn.Module, factory: str) -> None:
    """Raise FACTORY_FAILED for parameters and buffers that have no size or no values yet."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, t in tensors if nn.parameter.is_lazy(t)]
    meta = [name for name, t in tensors if t.is_meta]
    if lazy:
        why = f"{', '.join(lazy[:_SHOWN])} get their sizes from its first call"
        hint = (
            "let the factory call the model once on an example, or give the sizes (nn.Linear "
            "instead of nn.LazyLinear)"
        )
    elif meta:
        why = f"{', '.join(meta[:_SHOWN])} are on the device meta, which holds no values"
        hint = "make it on the CPU; or let the factory give it memory (to_empty) and values"
    else:
        return
    raise ExportError(
        "FACTORY_FAILED", f"the model is not finished: {why}", where=factory, hint=hint
    )


def _in_eval(module: nn.Module) -> nn.Module:
    """In eval mode. What ``torch.export`` gives back knows no modes: it is in the one that it was
    exported in."""
    try:
        return module.eval()
    except NotImplementedError:
        return module


def _settle_weights(module: nn.Module) -> None:
    """What is computed of parameters at each call, in eval mode always the same (torch's
    parametrizations, weight norm and spectral norm), is computed once."""
    for part in list(module.modules()):
        for hook in list(part._forward_pre_hooks.values()):
            if isinstance(hook, WeightNorm):
                remove_weight_norm(part, hook.name)
            elif isinstance(hook, SpectralNorm):
                remove_spectral_norm(part, hook.name)
        made_of = dict(part.named_children()).get("parametrizations")  # its own: wrappers pass on
        if isinstance(made_of, nn.ModuleDict) and made_of:
            _settle_parametrized(part, made_of)


def _settle_parametrized(part: nn.Module, made_of: nn.ModuleDict) -> None:
    """torch's remove_parametrizations() writes into the parameter, which may be somebody else's as
    well, and into the class, which is also that of copies of ``part``."""
    made: dict[str, Tensor] = {}
    for name, parts in made_of.items():
        weight = _settled(part, name) if isinstance(parts, ParametrizationList) else None
        if weight is None:
            return
        trained = parts._parameters
        made[name] = nn.Parameter(weight, requires_grad=False) if trained else nn.Buffer(weight)
    part.__class__ = type(part).__bases__[0]  # of which torch has made one with properties
    del part.parametrizations
    for name, weight in made.items():
        setattr(part, name, weight)


def _settled(part: nn.Module, name: str) -> Tensor | None:
    """A parametrized weight that is the same each time. One that fails is left for the first run of
    the model, whose failures are told."""
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
        weight: Tensor = getattr(part, name)
        if torch.equal(weight, getattr(part, name)):
            return weight.contiguous()
    return None


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and data parallelism's wrappers, which compute the same."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
