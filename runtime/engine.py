"""SpikeEngine: the runtime's face. Text in, text out; tokens in, logits out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from ..compiler.engine.directory import EngineDirectory
from ..errors import ExitCode, SpikeError
from .build_cache import engine_at
from .checks import require_count, require_instance
from .closing import Closing
from .fair_lock import FairLock
from .kv_tier import TierOptions
from .loading import LoadedEngine, LoadOptions, load_engine
from .loop import BatchLoop
from .prompts import (
    Prompt,
    RequestOptions,
    checked_ids,
    checked_text,
    make_request,
    require_codec,
    too_long,
)
from .scheduler import SchedulingPolicy
from .sequence import Completion
from .session import engine_closed
from .stats import EngineStats
from .stream import TokenStream

DEVICES = ("auto", "cpu")


class SpikeEngine(Closing):
    """A model ready to generate. Safe to use from several threads: their requests share steps.

    Args:
        path: an engine directory, or a Hugging Face checkpoint directory: that one is built into
            the cache (``$SPIKE_CACHE_DIR``) first, once.
        model_path: the same, by the name of the first announcement.
        quant_config: storage formats, ``{"linear": ..., "kv_cache": ...}``. A checkpoint is built
            with them; an engine must have been built with them.
        max_seq_len: most tokens of one sequence, prompt and output together. An upper bound: an
            engine built for fewer keeps its own capacity and a warning says so. None = the
            engine's.
        device_map: ``auto`` or ``cpu``; this version has no other device.
        threads: None = one for each physical core.
        max_num_tokens: most tokens of one step (prompts come in chunks); None = the engine's.
        kv_cache_memory: bytes for the KV cache; None = room for the engine's `max_batch_size`
            sequences of full length, at most half of the machine's memory.
        verify: hash every byte of the engine before loading it.
        scheduling: classes of service, prompt chunks, batching window; see docs/runtime.md.
        kv_tier: a file for prefix blocks that the KV cache has no room for; None = none.

    Raises:
        SpikeError: SPK601 nothing to load at the path, SPK602 or SPK603 `quant_config`, SPK604
            device, SPK608 a value out of range, SPK613 no compiler installed for a checkpoint,
            SPK614 model not loadable, SPK615 KV memory, SPK618 `kv_tier`, and SPK1xx to SPK5xx
            from building and opening.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        model_path: str | Path | None = None,
        quant_config: Mapping[str, str] | None = None,
        max_seq_len: int | None = None,
        device_map: str = "auto",
        threads: int | None = None,
        max_num_tokens: int | None = None,
        kv_cache_memory: int | None = None,
        verify: bool = False,
        scheduling: SchedulingPolicy | None = None,
        kv_tier: TierOptions | None = None,
    ) -> None:
        _require_device(device_map)
        require_count("max_num_tokens", max_num_tokens)
        require_policies(scheduling, kv_tier)
        options = LoadOptions(quant_config, max_seq_len, threads, kv_cache_memory)
        source = engine_at(_one_path(path, model_path), quant_config, max_seq_len)
        loaded = load_engine(EngineDirectory.open(source, verify), options)
        self._set_up(loaded, max_num_tokens, scheduling, kv_tier)

    @classmethod
    def from_loaded(
        cls,
        loaded: LoadedEngine,
        max_num_tokens: int | None = None,
        scheduling: SchedulingPolicy | None = None,
        kv_tier: TierOptions | None = None,
    ) -> Self:
        """An engine over parts that are there already (another executor, a test's model)."""
        require_policies(scheduling, kv_tier)
        engine = cls.__new__(cls)
        engine._set_up(loaded, max_num_tokens, scheduling, kv_tier)
        return engine

    def _set_up(
        self,
        loaded: LoadedEngine,
        max_num_tokens: int | None,
        scheduling: SchedulingPolicy | None,
        kv_tier: TierOptions | None,
    ) -> None:
        self._loaded = loaded
        self._limits = loaded.session.limits
        self._loop = BatchLoop(loaded.session, max_num_tokens, scheduling, kv_tier)
        self._lock = FairLock()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.closed

    @property
    def idle(self) -> bool:
        """Whether nobody's request waits or runs, and no step either."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._loop.sweep()
            return self._loop.idle
        finally:
            self._lock.release()

    @property
    def max_seq_len(self) -> int:
        """Most tokens of one sequence, prompt and output together."""
        return self._limits.max_seq_len

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._limits.vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text: union of config, generation_config and tokenizer."""
        return self._loaded.eos_ids

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Sampling values the checkpoint recommends; none of them is used unless passed on."""
        return dict(self._loaded.generation_defaults)

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text."""
        return self._loaded.codec is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether ``chat=True`` works."""
        return self._loaded.template is not None

    def stats(self) -> EngineStats:
        """Queue lengths, KV blocks, prefix cache, steps: as they are now."""
        with self._lock:
            return self._loop.stats()

    def clear_prefix_cache(self) -> None:
        """Forget the tokens of all requests so far; running ones go on."""
        with self._lock:
            self._loop.clear_prefix_cache()

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> TokenStream:
        """Generate, text piece by text piece.

        Args:
            prompt: text, or token ids; with ``chat=True`` a user's text or a list of messages.
            options: `RequestOptions` and `SamplingParams`: greedy, and 512 tokens at most, unless
                said otherwise.

        Returns:
            An iterator of strings; its `completion` has tokens, finish reason and timings.

        Raises:
            SpikeError: SPK605 prompt empty, SPK606 prompt too long, SPK607 id outside the
                vocabulary, SPK608 sampling option, SPK611 no tokenizer or template, SPK612
                template failed, SPK615 KV memory, SPK617 engine closed, SPK625 no usable grammar,
                SPK626 package for grammars missing. While iterating: SPK609
                logits are NaN, SPK616 a step failed.
        """
        self._require_open()
        request = make_request(self._loaded, prompt, options)
        self._loop.require_room(request)
        return TokenStream(self._loop, self._lock, request)

    def complete(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """Generate to the end; arguments and errors as for `stream`."""
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> str:
        """The generated text; arguments and errors as for `stream`."""
        require_codec(self._loaded, "generate()")
        return self.complete(prompt, **options).text

    def generate_batch(
        self, prompts: Sequence[Prompt], **options: Unpack[RequestOptions]
    ) -> list[Completion]:
        """Generate for several prompts in shared steps; the options hold for each.

        A request that fails on the way gives a completion with `finish_reason` ``error``; the
        others go on. A prompt that can't be taken at all raises before anything runs.
        """
        streams = [self.stream(prompt, **options) for prompt in prompts]
        try:
            with self._lock:
                for stream in streams:
                    stream.submit_locked()
            for stream in streams:
                stream.run()
        finally:
            for stream in streams:
                stream.close()
        return [stream.completion for stream in streams]

    async def astream(
        self, prompt: Prompt, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[str]:
        """`stream` for asyncio: steps run in worker threads; cancelling ends the request."""
        stream = self.stream(prompt, **options)
        try:
            while (piece := await asyncio.to_thread(next, stream, None)) is not None:
                yield piece
        finally:
            stream.abandon()

    async def agenerate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> str:
        """`generate` for asyncio."""
        require_codec(self._loaded, "agenerate()")
        return "".join([piece async for piece in self.astream(prompt, **options)])

    def score(
        self, token_ids: Sequence[int], *, chunk_tokens: int | None = None
    ) -> NDArray[np.float32]:
        """Logits at every position (teacher forcing).

        Args:
            token_ids: 1 to `max_seq_len` ids.
            chunk_tokens: most tokens of one step; 1 = as in decoding. None = as many as pays.

        Returns:
            float32 ``[len(token_ids), vocab_size]``; row t is the prediction after token t.

        Raises:
            SpikeError: SPK605, SPK606, SPK607, SPK608, SPK615, SPK616, SPK617.
        """
        self._require_open()
        require_count("chunk_tokens", chunk_tokens)
        ids = checked_ids(token_ids, self.vocab_size)
        if len(ids) > self.max_seq_len:
            raise too_long(len(ids), self.max_seq_len, "to be scored")
        with self._lock:
            return self._loop.score(ids, chunk_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises SpikeError SPK611 without a tokenizer."""
        codec = require_codec(self._loaded, "encode()")
        return codec.encode(checked_text(text), add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Raises SpikeError SPK611 without a tokenizer."""
        codec = require_codec(self._loaded, "decode()")
        ids = checked_ids(token_ids, self.vocab_size) if len(token_ids) else []
        return codec.decode(ids, skip_special_tokens)

    def close(self) -> None:
        """End all requests, let go of the model and the cache; then everything raises SPK617."""
        with self._lock:
            if not self._loop.closed:
                self._loop.close()
                self._loaded.session.close()

    def _require_open(self) -> None:
        if self._loop.closed:
            raise engine_closed()


def _require_device(device_map: str) -> None:
    if device_map not in DEVICES:
        raise SpikeError(
            "SPK604",
            "device_map",
            f"{device_map!r} is not available: this version runs on the CPU.",
            "Leave device_map out, or give 'auto' or 'cpu'.",
            ExitCode.UNSUPPORTED,
        )


def require_policies(scheduling: object, kv_tier: object) -> None:
    """Policies of their own kinds, or none; SpikeError SPK608 otherwise."""
    require_instance("scheduling", scheduling, SchedulingPolicy, optional=True)
    require_instance("kv_tier", kv_tier, TierOptions, optional=True)


def _one_path(path: str | Path | None, model_path: str | Path | None) -> Path:
    given = [Path(p) for p in (path, model_path) if p is not None]
    if len(given) != 1:
        raise TypeError("SpikeEngine needs one path: SpikeEngine(PATH) or model_path=PATH")
    return given[0]
