"""Runs inside llama.cpp's venv (numpy and llama_cpp only); commands as in `serve.py`, and

    quantise  source, out, kind, imatrix (optional: an .npz of mean squares by tensor name)
    tokenize  text                        -> ids, with the special tokens that the file adds

KV cache f16 and batch sizes are llama.cpp's defaults; greedy sampling is an argmax in numpy.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp as ll
import numpy as np
from serve import Command, serve

# llama_ftype in llama.h
KINDS = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}


class Context:
    """The cache of some sequences, and a batch to fill.

    Args:
        model: llama_model pointer.
        threads: for prompts and for single tokens.
        sequences: how many share it.
        tokens: most tokens of each.
    """

    def __init__(self, model: Any, threads: int, sequences: int, tokens: int) -> None:
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * tokens, sequences
        params.n_threads = params.n_threads_batch = threads
        self.pointer = ll.llama_init_from_model(model, params)
        if not self.pointer:
            raise ValueError(f"llama.cpp made no context for {sequences} times {tokens} tokens")
        self.vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
        self.chunk = int(ll.llama_n_batch(self.pointer))
        self.batch = ll.llama_batch_init(self.chunk, 0, 1)
        self.sequences, self.tokens = sequences, tokens

    def clear(self) -> None:
        """Forget all tokens."""
        ll.llama_memory_clear(ll.llama_get_memory(self.pointer), True)

    def run(self, inputs: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """One run over at most `chunk` inputs (token, position, sequence, wanted): a view of the
        logits ``[wanted, V]``."""
        batch = self.batch
        batch.n_tokens = len(inputs)
        for i, (token, position, sequence, wanted) in enumerate(inputs):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = ll.llama_decode(self.pointer, batch)
        if status:
            raise ValueError(f"llama_decode returned {status}")
        rows = sum(wanted for *_, wanted in inputs)
        logits = ll.llama_get_logits(self.pointer)
        return np.ctypeslib.as_array(logits, shape=(rows, self.vocabulary))

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """From empty, in as few runs as there is room for; the likeliest next tokens."""
        self.clear()
        inputs = [
            (token, i, sequence, i == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        following: list[int] = []
        for start in range(0, len(inputs), self.chunk):
            piece = inputs[start : start + self.chunk]
            if any(wanted for *_, wanted in piece):
                following += self.run(piece).argmax(-1).tolist()
            else:
                self.run([*piece[:-1], (*piece[-1][:3], True)])  # a run has at least one output
        return following


class Session:
    """A loaded model; a context for one sequence, and one for several when they come."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp could not load {path}")
        self.threads = threads
        self.one = Context(self.model, threads, 1, context)
        self.several: Context | None = None

    def context(self, prompts: list[list[int]], steps: int) -> Context:
        """One that holds the prompts and what follows them."""
        if len(prompts) == 1:
            return self.one
        need = max(map(len, prompts)) + steps + 1
        several = self.several
        if several is None or several.sequences < len(prompts) or several.tokens < need:
            # A context gets blocks of 256 tokens for each sequence.
            size = -(-need // 256) * 256
            several = self.several = Context(self.model, self.threads, len(prompts), size)
        return several

    def generate(self, prompts: list[list[int]], steps: int) -> tuple[float, float]:
        """Prefill, then `steps` runs of one token of each sequence."""
        context = self.context(prompts, steps)
        start = time.perf_counter()
        tokens = context.prefill(prompts)
        middle = time.perf_counter()
        for step in range(steps):
            inputs = [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(tokens)]
            tokens = context.run(inputs).argmax(-1).tolist()
        return middle - start, time.perf_counter() - middle

    def score(self, tokens: list[int], first: int) -> np.ndarray:
        """In chunks, from empty."""
        context = self.one
        context.clear()
        rows = []
        for start in range(0, len(tokens), context.chunk):
            piece = tokens[start : start + context.chunk]
            inputs = [(token, start + i, 0, True) for i, token in enumerate(piece)]
            rows.append(context.run(inputs).copy())
        return np.concatenate(rows)[first:]


def tokenize(command: Command, session: Session) -> dict[str, Any]:
    """Ids of a text; names of special tokens in it are plain text."""
    data = command["text"].encode()
    ids = (ll.llama_token * (len(data) + 8))()
    vocabulary = ll.llama_model_get_vocab(session.model)
    count = ll.llama_tokenize(vocabulary, data, len(data), ids, len(ids), True, False)
    if count < 0:
        raise ValueError(f"llama_tokenize returned {count}")
    return {"ids": list(ids[:count])}


def quantise(command: Command, _: Session | None) -> dict[str, Any]:
    """llama.cpp's default mix of a type, from a float GGUF."""
    params = ll.llama_model_quantize_default_params()
    params.ftype = KINDS[command["kind"]]
    if "imatrix" in command:
        means = np.load(command["imatrix"])  # held until the call below is over
        arrays = {name: np.ascontiguousarray(means[name], np.float32) for name in means.files}
        params.imatrix = imatrix_data(arrays)
    start = time.perf_counter()
    status = ll.llama_model_quantize(
        command["source"].encode(), command["out"].encode(), ctypes.byref(params)
    )
    if status:
        raise ValueError(f"llama_model_quantize returned {status}")
    return {"seconds": time.perf_counter() - start}


def imatrix_data(arrays: dict[str, np.ndarray]) -> Any:
    """A C array of (name, floats, count), ended by an empty one."""
    entries = (ll.llama_model_imatrix_data * (len(arrays) + 1))()
    for entry, (name, values) in zip(entries, arrays.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return entries


def main() -> None:
    """Serve, with llama.cpp's own log silenced."""
    silent = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(silent, ctypes.c_void_p(0))
    ll.llama_backend_init()
    serve(Session, {"quantise": quantise, "tokenize": tokenize})


if __name__ == "__main__":
    main()
