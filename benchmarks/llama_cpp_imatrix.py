"""Runs inside llama.cpp's venv: what llama.cpp's own matrices see, and quantising with an imatrix.

    collect  MODEL.gguf WINDOWS.npy OUT.npz     sums of squares and tokens of every matrix's input
    quantise MODEL.gguf SUMS.npz OUT.gguf KIND  llama.cpp's mix with these as importance matrix

The peer's package has libraries but no tools. `collect` does in its evaluation callback what
llama-imatrix does in its own (tools/imatrix/imatrix.cpp), dense matrices only: products of at least
16 tokens, of `blk.*` and `output.weight`. WINDOWS are int32 [B, T], each a sequence of its own.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llama_cpp as ll
import numpy as np

KINDS = {"Q2_K": 10, "Q3_K_M": 12, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}
"""llama_ftype in llama.h"""
MUL_MAT, F32, FEWEST_TOKENS = 29, 0, 16


class Tensor(ctypes.Structure):
    """`ggml_tensor` of ggml 0.25 (ggml.h), as far as it is read."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


class Collector:
    """Sums by name of the matrix."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}
        self.counts: dict[str, int] = {}

    def __call__(self, address: int, ask: bool, _: object) -> bool:
        """The scheduler's callback: with `ask`, whether we want to see the node's result."""
        node = ctypes.cast(address, ctypes.POINTER(Tensor)).contents
        if node.op != MUL_MAT:
            return not ask
        weight, x = node.src[0].contents, node.src[1].contents
        name = weight.name.decode()
        wanted = name.startswith("blk.") or name == "output.weight"
        if not wanted or x.type != F32 or x.ne[1] < FEWEST_TOKENS:
            return not ask
        if not ask:
            self._add(name, x)
        return True

    def _add(self, name: str, x: Tensor) -> None:
        k, tokens = x.ne[0], x.ne[1]
        assert x.ne[2] == x.ne[3] == 1
        assert x.nb[1] == 4 * k
        raw = (ctypes.c_float * (k * tokens)).from_address(x.data)
        rows = np.frombuffer(raw, np.float32).reshape(tokens, k).astype(np.float64)
        self.sums[name] = self.sums.get(name, 0) + np.square(rows).sum(0)
        self.counts[name] = self.counts.get(name, 0) + tokens


def collect(model_path: str, windows_path: str, out: str) -> None:
    """Runs the windows through the model, one by one."""
    windows = np.load(windows_path)
    collector = Collector()
    params = ll.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = windows.shape[1]
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = F32
    params.flash_attn_type = 0  # off: the plain products of the reference
    callback = type(params.cb_eval)(collector)
    params.cb_eval = callback
    model = ll.llama_model_load_from_file(model_path.encode(), ll.llama_model_default_params())
    context = ll.llama_init_from_model(model, params)
    batch = ll.llama_batch_init(windows.shape[1], 0, 1)
    for window in windows.tolist():
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        batch.n_tokens = len(window)
        for i, token in enumerate(window):
            batch.token[i], batch.pos[i] = token, i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = True  # else the last layer drops the other rows
        if ll.llama_decode(context, batch):
            raise ValueError("llama_decode failed")
    found = {f"{n}.in_sum2": s for n, s in collector.sums.items()}
    found |= {f"{n}.counts": np.array([c]) for n, c in collector.counts.items()}
    np.savez(out, **found)


def quantise(model_path: str, sums_path: str, out: str, kind: str) -> None:
    """As llama-quantize --imatrix: sums divided by counts."""
    file = np.load(sums_path)
    means = {
        name.removesuffix(".in_sum2"): np.ascontiguousarray(
            file[name] / file[name.replace(".in_sum2", ".counts")].reshape(-1, 1), np.float32
        )
        for name in file.files
        if name.endswith(".in_sum2")
    }
    data = (ll.llama_model_imatrix_data * (len(means) + 1))()
    for entry, (name, values) in zip(data, means.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params = ll.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.imatrix = KINDS[kind], 1, data
    if ll.llama_model_quantize(model_path.encode(), out.encode(), ctypes.byref(params)):
        raise ValueError("llama_model_quantize failed")


if __name__ == "__main__":
    {"collect": collect, "quantise": quantise}[sys.argv[1]](*sys.argv[2:])
