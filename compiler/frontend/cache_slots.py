"""What a model keeps between steps, as explicit graph inputs and outputs.

`transformers` models read and write their cache through `Cache.update` and its kin. Here each layer
of that cache holds its past as plain tensors: keys, values and index keys grow by `concat(past,
new)`, convolution and recurrent states are replaced by new tensors. So the traced graph is a
function from past to present. Which slots exist and how wide they are is learned by one forward
pass on fake tensors, so nothing here knows an architecture.

A convolution or recurrent state of zeros is what a sequence starts from: it stands for the absent
tokens before the first one, as the zero padding of a prefill does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

PAST_AXIS = 2  # of [batch, heads, tokens, width]
GROWING = ("key", "value", "index", "tokens")


@dataclass(frozen=True)
class CacheSlot:
    """One tensor that one cache layer keeps.

    Args:
        layer: index of the layer in the model's cache.
        part: ``key``, ``value``, ``index`` or ``tokens`` (grow), ``conv.N`` or ``recurrent.N``
            (replaced).
        shape: sizes after the batch: ``(heads, 0, width)`` of an empty past, or the whole state.
    """

    layer: int
    part: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the state, such as ``layers.3.key``."""
        return f"layers.{self.layer}.{self.part}"

    @property
    def grows(self) -> bool:
        """Whether a step appends rows along `PAST_AXIS`; otherwise it replaces the tensor."""
        return self.part in GROWING

    def past(self, batch: int, tokens: int) -> torch.Tensor:
        """Zeros, f32 [batch, heads, tokens, width] or [batch, *shape]."""
        heads, *rest = self.shape
        shape = (heads, tokens, rest[-1]) if self.grows else self.shape
        return torch.zeros(batch, *shape)


class FunctionalLayer(LinearAttentionCacheLayerMixin, CacheLayerMixin):  # type: ignore[misc]
    """One layer's cache without in-place writes; transformers' base classes have no types.

    Attributes:
        grown: part -> past, [B, H, P, D]; a missing part has an empty past.
        conv_states, recurrent_states: state number -> tensor.
        has_previous_state: state number -> whether the states continue a sequence.
    """

    is_sliding = False  # windows are left to the mask, which then shows them
    is_compileable = False
    supports_early_init = False

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)
        self.grown: dict[str, Any] = {}
        self.conv_states: dict[int, Any] = defaultdict(lambda: None)
        self.recurrent_states: dict[int, Any] = defaultdict(lambda: None)
        self.has_previous_state: dict[int, bool] = defaultdict(bool)
        self.record_past = False
        self.is_initialized = True

    def put(self, part: str, past: torch.Tensor) -> None:
        """Sets the past of a slot."""
        kind, _, number = part.partition(".")
        if kind in GROWING:
            self.grown[part] = past
            return
        states = self.conv_states if kind == "conv" else self.recurrent_states
        states[int(number)] = past
        self.has_previous_state[int(number)] = True

    def parts(self) -> dict[str, Any]:
        """Every slot's content by part, in a fixed order."""
        found = {part: self.grown[part] for part in GROWING if part in self.grown}
        for kind, states in (("conv", self.conv_states), ("recurrent", self.recurrent_states)):
            found |= {f"{kind}.{i}": states[i] for i in sorted(states) if states[i] is not None}
        return found

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Nothing to do: an empty past needs no tensor."""

    def _grow(self, part: str, new: Any) -> Any:
        if part in self.grown:
            new = torch.cat((self.grown[part], new), PAST_AXIS)
        self.grown[part] = new
        return new

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Past and new keys and values, [B, Hkv, P + S, D] each."""
        return self._grow("key", key_states), self._grow("value", value_states)

    def update_indexer(self, states: Any) -> Any:
        """Past and new index keys, [B, P + S, D]; the state has one head."""
        return self._grow("index", states.unsqueeze(1)).squeeze(1)

    def update_conv_state(
        self, conv_states: Any, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Any:
        """The inputs that the convolution may see, [B, C, K + S]; the last K are kept."""
        old = self.conv_states[state_idx]
        if old is None:
            width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            missing = max(width - conv_states.shape[-1], 0)
            full = torch.nn.functional.pad(conv_states, (missing, 0))
        else:
            width = old.shape[-1]
            full = torch.cat((old, conv_states), -1)
        self.conv_states[state_idx] = full[..., -width:]
        self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **_: Any) -> Any:
        """The new state as it is."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    @property
    def keys(self) -> Any:
        """Past keys [B, Hkv, P, Dk] or None."""
        return self.grown.get("key")

    @keys.setter
    def keys(self, keys: Any) -> None:
        if keys is not None:
            self.grown["key"] = keys

    @property
    def values(self) -> Any:
        """Past values [B, Hkv, P, Dv] or None."""
        return self.grown.get("value")

    @values.setter
    def values(self, values: Any) -> None:
        if values is not None:
            self.grown["value"] = values

    def get_seq_length(self) -> Any:
        """Cached tokens: an int, or a symbolic one while tracing."""
        return next((past.shape[PAST_AXIS] for past in self.grown.values()), 0)

    def get_mask_sizes(self, query_length: Any) -> tuple[Any, int]:
        """Length and offset of the keys that the next step attends to."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1


class FunctionalCache(Cache):  # type: ignore[misc]  # transformers has no types
    """A cache of `FunctionalLayer`s, which come into being when a model first uses them."""

    def __init__(self, layers: Sequence[FunctionalLayer] = ()) -> None:
        super().__init__(layers=_Layers(layers))

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Cached tokens of the layer, or of the first one that counts them."""
        return self._counting(layer_idx).get_seq_length()

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[Any, int]:
        """As the layer's."""
        sizes: tuple[Any, int] = self._counting(layer_idx).get_mask_sizes(query_length)
        return sizes

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether a layer (any layer, if none is named) continues a sequence."""
        layers = list(self.layers) if layer_idx is None else [self.layers[layer_idx]]
        if state_idx is None:
            return any(value for layer in layers for value in layer.has_previous_state.values())
        return any(layer.has_previous_state[state_idx] for layer in layers)

    def _counting(self, layer_idx: int) -> FunctionalLayer:
        layer: FunctionalLayer = self.layers[layer_idx]
        return layer if layer.grown else next((c for c in self.layers if c.grown), layer)


class _Layers(list[FunctionalLayer]):
    """A list that grows to any index that is read."""

    def __getitem__(self, index: Any) -> Any:
        while isinstance(index, int) and len(self) <= index:
            self.append(FunctionalLayer())
        return super().__getitem__(index)


def cache_from(slots: Iterable[CacheSlot], pasts: Sequence[torch.Tensor]) -> FunctionalCache:
    """A cache that holds `pasts`, one per slot in order."""
    cache = FunctionalCache()
    for slot, past in zip(slots, pasts, strict=True):
        cache.layers[slot.layer].put(slot.part, past)
    return cache


def slots_of(cache: FunctionalCache) -> tuple[CacheSlot, ...]:
    """The slots that a forward pass with an empty cache has filled."""
    return tuple(
        _slot(i, *item) for i, layer in enumerate(cache.layers) for item in layer.parts().items()
    )


def _slot(layer: int, part: str, content: Any) -> CacheSlot:
    shape = [int(size) for size in content.shape[1:]]
    return CacheSlot(layer, part, (shape[0], 0, shape[2]) if part in GROWING else tuple(shape))
