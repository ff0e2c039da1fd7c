"""The KV cache as explicit graph inputs: which slots a model has, and a cache that concatenates.

`transformers` models read and write their cache through `Cache.update`. Here each layer of that
cache holds its past as plain tensors and returns `concat(past, new)`, so the traced graph is a
function from past to present. Which layers exist and how wide they are is learned by one forward
pass on fake tensors, so nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ...errors import ExitCode, SpikeError

PAST_AXIS = 2  # of [batch, kv heads, tokens, width]


@dataclass(frozen=True)
class CacheSlot:
    """One cached tensor ``f32[B, heads, P, width]`` of one cache layer.

    Args:
        layer: index of the layer in the model's cache.
        part: ``key`` or ``value``.
    """

    layer: int
    part: str
    heads: int
    width: int

    @property
    def name(self) -> str:
        """Name of the state, such as ``layers.3.key``."""
        return f"layers.{self.layer}.{self.part}"

    def past(self, batch: int, tokens: int) -> torch.Tensor:
        """A zero past, f32 [batch, heads, tokens, width]."""
        return torch.zeros(batch, self.heads, tokens, self.width)


class ConcatLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """One attention layer's cache: `update` returns past and new, concatenated.

    Args:
        keys: past keys [B, Hkv, P, Dk]; None for an empty past.
        values: past values [B, Hkv, P, Dv].
    """

    is_sliding = False  # windows are left to the mask, which then shows them
    is_compileable = False

    def __init__(self, keys: Any = None, values: Any = None) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = keys is not None

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing to do: an empty past needs no tensor."""

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Past and new keys and values, [B, Hkv, P + S, D] each."""
        if self.is_initialized:
            key_states = torch.cat((self.keys, key_states), PAST_AXIS)
            value_states = torch.cat((self.values, value_states), PAST_AXIS)
        self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    def get_seq_length(self) -> Any:
        """Cached tokens: an int, or a symbolic one while tracing."""
        return self.keys.shape[PAST_AXIS] if self.is_initialized else 0

    def get_mask_sizes(self, query_length: Any) -> tuple[Any, int]:
        """Length and offset of the keys that the next step attends to."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class ConcatCache(Cache):  # type: ignore[misc]  # transformers has no types
    """A cache of `ConcatLayer`s; refuses the other kinds of state a model may ask it to keep."""

    def __init__(self, layers: Sequence[ConcatLayer] = ()) -> None:
        super().__init__(layers=list(layers))

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        """As `Cache.update`; missing layers are added empty."""
        while len(self.layers) <= layer_idx:
            self.layers.append(ConcatLayer())
        return self.layers[layer_idx].update(key_states, value_states)

    def _refuse(self, what: str, layer_idx: int | None) -> SpikeError:
        return SpikeError(
            "SPK203",
            "lowering",
            f"layer {layer_idx} keeps a {what} between steps; only attention keys and values are "
            "supported in this version.",
            "Use a model whose layers all are attention layers.",
            ExitCode.UNSUPPORTED,
        )

    def get_conv_state(self, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Refused with SPK203."""
        raise self._refuse("convolution state", layer_idx)

    def update_conv_state(self, conv_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Refused with SPK203."""
        raise self._refuse("convolution state", layer_idx)

    def get_recurrent_state(self, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Refused with SPK203."""
        raise self._refuse("recurrent state", layer_idx)

    def update_recurrent_state(self, states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Refused with SPK203."""
        raise self._refuse("recurrent state", layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, *_: Any, **__: Any) -> bool:
        """Refused with SPK203."""
        raise self._refuse("recurrent or convolution state", layer_idx)

    def update_indexer(self, states: Any, layer_idx: int) -> Any:
        """Refused with SPK203."""
        raise self._refuse("sparse attention index", layer_idx)


def cache_from(slots: Iterable[CacheSlot], pasts: Sequence[torch.Tensor]) -> ConcatCache:
    """A cache that holds `pasts`, one per slot in order."""
    held = {(s.layer, s.part): past for s, past in zip(slots, pasts, strict=True)}
    count = max((layer for layer, _ in held), default=-1) + 1
    layers = [ConcatLayer(held.get((i, "key")), held.get((i, "value"))) for i in range(count)]
    return ConcatCache(layers)


def slots_of(cache: ConcatCache) -> tuple[CacheSlot, ...]:
    """The slots that a forward pass with an empty cache has filled."""
    slots = []
    for index, layer in enumerate(cache.layers):
        for part, tensor in (("key", layer.keys), ("value", layer.values)):
            if tensor is not None:
                slots.append(CacheSlot(index, part, int(tensor.shape[1]), int(tensor.shape[3])))
    return tuple(slots)
