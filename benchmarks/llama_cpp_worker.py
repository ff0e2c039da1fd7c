"""Runs inside llama.cpp's venv (numpy and llama_cpp only); commands as in `worker.py`.

    open      model, threads, context        -> seconds to load, seconds to the first token
    score     tokens, first                  -> shape, then raw float32 logits
    decode    tokens, steps                  -> seconds of prefill and of `steps` single-token runs
    quantise  source, out, kind, imatrix (optional: an .npz of mean squares by tensor name)
    tokenize  text                           -> ids, with the special tokens that the file adds

KV cache f16 and batch sizes are llama.cpp's defaults; greedy sampling is an argmax in numpy.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import llama_cpp as ll
import numpy as np

# llama_ftype in llama.h
KINDS = {"Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}


class Session:
    """A loaded model with one context; logits of a chunk at a time."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        start = time.perf_counter()
        self.model = ll.llama_model_load_from_file(path.encode(), ll.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp could not load {path}")
        params = ll.llama_context_default_params()
        params.n_ctx = context
        params.n_threads = params.n_threads_batch = threads
        self.context = ll.llama_init_from_model(self.model, params)
        self.vocabulary = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.chunk = int(ll.llama_n_batch(self.context))
        self.batch = ll.llama_batch_init(self.chunk, 0, 1)
        self.load_seconds = time.perf_counter() - start
        self.step([1], 0, every=False)
        self.first_token_seconds = time.perf_counter() - start
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)

    def step(self, tokens: list[int], start: int, every: bool) -> np.ndarray:
        """One run over at most `chunk` tokens; a view of the logits `[T or 1, V]`."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = every or i == len(tokens) - 1
        status = ll.llama_decode(self.context, batch)
        if status:
            raise ValueError(f"llama_decode returned {status}")
        rows = len(tokens) if every else 1
        logits = ll.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, shape=(rows, self.vocabulary))

    def prefill(self, tokens: list[int]) -> int:
        """From empty; returns the likeliest next token."""
        self.clear()
        for start in range(0, len(tokens), self.chunk):
            logits = self.step(tokens[start : start + self.chunk], start, every=False)
        return int(logits[0].argmax())


def tokenize(session: Session, text: str) -> list[int]:
    """Ids of a text; names of special tokens in it are plain text."""
    data = text.encode()
    ids = (ll.llama_token * (len(data) + 8))()
    vocabulary = ll.llama_model_get_vocab(session.model)
    count = ll.llama_tokenize(vocabulary, data, len(data), ids, len(ids), True, False)
    if count < 0:
        raise ValueError(f"llama_tokenize returned {count}")
    return list(ids[:count])


def quantise(command: dict[str, Any]) -> dict[str, Any]:
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


def decode(session: Session, command: dict[str, Any]) -> dict[str, Any]:
    """Prefill, then `steps` greedy single-token runs."""
    start = time.perf_counter()
    token = session.prefill(command["tokens"])
    middle = time.perf_counter()
    length = len(command["tokens"])
    for i in range(command["steps"]):
        token = int(session.step([token], length + i, every=False)[0].argmax())
    return {"prefill_seconds": middle - start, "decode_seconds": time.perf_counter() - middle}


def score(session: Session, command: dict[str, Any], out: int) -> None:
    """Write the shape, then the logits of the wanted rows."""
    tokens, first = command["tokens"], command["first"]
    session.clear()
    shape = [len(tokens) - first, session.vocabulary]
    os.write(out, json.dumps({"shape": shape}).encode() + b"\n")
    with os.fdopen(os.dup(out), "wb") as pipe:
        for start in range(0, len(tokens), session.chunk):
            logits = session.step(tokens[start : start + session.chunk], start, every=True)
            pipe.write(logits[max(first - start, 0) :].tobytes())


def main() -> None:
    """Serve commands until the input ends."""
    # llama.cpp prints to stdout and stderr on its own: keep the pipe for us, silence its log.
    out = os.dup(1)
    os.dup2(2, 1)
    silent = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(silent, ctypes.c_void_p(0))
    ll.llama_backend_init()
    session: Session | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "score" and session:
                score(session, command, out)
                continue
            if command["do"] == "open":
                session = Session(command["model"], command["threads"], command["context"])
                answer = {
                    "load_seconds": session.load_seconds,
                    "first_token_seconds": session.first_token_seconds,
                }
            elif command["do"] == "decode" and session:
                answer = decode(session, command)
            elif command["do"] == "tokenize" and session:
                answer = {"ids": tokenize(session, command["text"])}
            elif command["do"] == "quantise":
                answer = quantise(command)
            else:
                answer = {"error": f"{command['do']} is unknown or comes before open"}
        except (ValueError, KeyError) as error:
            answer = {"error": str(error)}
        os.write(out, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
