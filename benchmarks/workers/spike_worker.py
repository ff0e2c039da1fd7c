"""Runs SpikeInfer; commands as in `serve.py`."""

from __future__ import annotations

import numpy as np
from serve import serve
from spikeinfer import SpikeEngine
from spikeinfer.runtime import SchedulingPolicy


class Engine:
    """An engine directory, through the runtime's public face."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        plain = SchedulingPolicy(prefix_cache=False)  # a prompt is measured again and again
        self._engine = SpikeEngine(path, threads=threads, scheduling=plain)
        if self._engine.max_seq_len < context:
            raise ValueError(f"{path} is for {self._engine.max_seq_len} tokens, not {context}")

    def generate(self, prompts: list[list[int]], steps: int) -> tuple[float, float]:
        """Times as the runtime keeps them, from submission on."""
        done = self._engine.generate_batch(prompts, max_tokens=steps + 1, ignore_eos=True)
        for completion in done:
            if len(completion.token_ids) != steps + 1:
                raise ValueError(f"{len(completion.token_ids)} tokens came, not {steps + 1}")
        first = [one.timings.queue + one.timings.prefill for one in done]
        last = [start + one.timings.decode for start, one in zip(first, done, strict=True)]
        return max(first), max(last) - max(first)

    def score(self, tokens: list[int], first: int) -> np.ndarray:
        """Teacher forcing."""
        return self._engine.score(tokens)[first:]


if __name__ == "__main__":
    serve(Engine)
