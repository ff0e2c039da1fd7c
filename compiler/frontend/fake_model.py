"""A model that can be traced without its weights.

Parameters become fake tensors (shape and dtype, no storage). Buffers that no checkpoint holds,
such as RoPE's inverse frequencies, are computed on the CPU by the model's own initialisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...errors import ExitCode, SpikeError

FROZEN = "frozen"  # a RoPE type that transformers' per-step update leaves alone


def make_traceable(
    model: torch.nn.Module, mode: FakeTensorMode, max_positions: int | None = None
) -> None:
    """Changes `model` (on meta) in place so that it runs in `mode`, in float32.

    Args:
        max_positions: longest sequence to be served, which decides RoPE tables that depend on it;
            the config's own maximum if None.

    Raises: SPK204 for a RoPE that changes with the length, SPK205 for a buffer without a value.
    """
    model.to(torch.float32)
    _use_traceable_experts(model)
    computed = _compute_buffers(model)
    _freeze_rope(model, max_positions)
    _fake_storage(model, mode, computed)


def _use_traceable_experts(model: torch.nn.Module) -> None:
    """The default loops over the experts that were hit, which depends on data."""
    if isinstance(model, PreTrainedModel) and model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")


def _compute_buffers(model: torch.nn.Module) -> set[int]:
    """Gives non-persistent buffers their values; ids of the tensors.

    A buffer counts as computed when its version says that something wrote to it.
    """
    buffers: list[tuple[str, Any, torch.Tensor]] = []
    initialised: dict[torch.nn.Module, Any] = {}
    for path, module, owner in _owned_modules(model):
        for name in module._non_persistent_buffers_set:
            old = module._buffers[name]
            if old is None:
                continue
            module._buffers[name] = made = torch.zeros(old.shape, dtype=old.dtype)
            buffers.append((f"{path}.{name}" if path else name, owner, made))
            initialised[module] = owner
    _initialise(initialised)
    if any(made._version == 0 for _, _, made in buffers):  # a model may fill its layers' buffers
        _initialise({o: o for _, o, made in buffers if made._version == 0})
    for name, owner, made in buffers:
        if made._version == 0:
            raise _no_value(name, owner)
    return {id(made) for _, _, made in buffers}


def _initialise(modules: Mapping[torch.nn.Module, Any]) -> None:
    """Each by its owner's rules."""
    with torch.no_grad():
        for module, owner in modules.items():
            if hasattr(owner, "_init_weights"):
                owner._init_weights(module)


def _owned_modules(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Module, Any]]:
    """Path, module and the nearest enclosing PreTrainedModel, whose rules initialise it."""
    owners: dict[str, Any] = {}
    for path, module in model.named_modules():
        parent = owners.get(path.rpartition(".")[0], model)
        owners[path] = module if isinstance(module, PreTrainedModel) else parent
        yield path, module, owners[path]


def _no_value(name: str, owner: Any) -> SpikeError:
    return SpikeError(
        "SPK205",
        "lowering",
        f"buffer {name} of {type(owner).__name__} is not in the checkpoint, and the model's own "
        "initialisation gives it no value.",
        "Report it with the model type: its _init_weights has to set the buffer.",
        ExitCode.UNSUPPORTED,
    )


def _freeze_rope(model: torch.nn.Module, max_positions: int | None) -> None:
    """Chooses one table where RoPE depends on the sequence length.

    longrope has a short and a long table and, in transformers, switches at the original length
    while a cache holds keys rotated by the other one. An engine keeps to one: long if sequences
    may grow beyond the original length.
    """
    for path, module in model.named_modules():
        types = getattr(module, "rope_type", None)
        if isinstance(types, str):
            module.rope_type = _frozen(module, path, types, None, max_positions)
        elif isinstance(types, MutableMapping):
            for layer_type, rope_type in types.items():
                types[layer_type] = _frozen(module, path, rope_type, layer_type, max_positions)


def _frozen(
    module: Any, path: str, rope_type: str, layer_type: str | None, max_positions: int | None
) -> str:
    if rope_type != "longrope" and "dynamic" not in rope_type:
        return rope_type
    longest = max_positions or module.config.max_position_embeddings
    rope = module.config.rope_parameters
    rope = rope if layer_type is None else rope[layer_type]
    if "dynamic" in rope_type:
        original = module.original_max_seq_len
        if longest > original:
            raise _length_dependent(path, original, longest)
        return FROZEN
    original = rope["original_max_position_embeddings"]
    if longest > original:
        kwargs = {} if layer_type is None else {"layer_type": layer_type}
        table, _ = ROPE_INIT_FUNCTIONS[rope_type](
            module.config, torch.device("cpu"), seq_len=original + 1, **kwargs
        )
        prefix = "" if layer_type is None else f"{layer_type}_"
        getattr(module, f"{prefix}inv_freq").copy_(table)
    return FROZEN


def _length_dependent(path: str, original: int, longest: int) -> SpikeError:
    return SpikeError(
        "SPK204",
        "lowering",
        f"{path} uses dynamic NTK RoPE, which recomputes its frequencies beyond {original} "
        f"positions while cached keys keep the old ones; {longest} positions were asked for.",
        f"Build with --max-seq-len {original} or less.",
        ExitCode.UNSUPPORTED,
    )


def _fake_storage(model: torch.nn.Module, mode: FakeTensorMode, computed: set[int]) -> None:
    """Parameters and persistent buffers become fake CPU tensors; tied ones stay one tensor."""
    made: dict[int, Any] = {}
    with mode:
        for module in model.modules():
            for table, wrap in ((module._parameters, True), (module._buffers, False)):
                for name, tensor in table.items():
                    if tensor is None or id(tensor) in computed:
                        continue
                    if id(tensor) not in made:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                        made[id(tensor)] = (
                            torch.nn.Parameter(fake, requires_grad=False) if wrap else fake,
                            tensor,  # kept, so that its id stays taken
                        )
                    table[name] = made[id(tensor)][0]
