"""Loads an engine directory and generates from it: numpy, onnxruntime, tokenizers, jinja2, kernels.

engine.py       SpikeEngine                       stream.py         text pieces of one request
engine_pool.py  several engines in one process    checks.py         single values that callers give
prompts.py      what callers give -> a request    sequence.py       one request and its Completion
loop.py         runs the steps                    batch.py          a step's arrays
scheduler.py    who takes part in the next step   qos.py            who goes first
chunking.py     prompts beside decoding           step_cost.py      what a step costs
length_order.py who is expected to end soon       batch_window.py   waiting for company
stats.py          engine.stats()
blocks.py       KV blocks: who owns which         prefix_cache.py   blocks found by their tokens
kv_pool.py      size and memory of the pool       block_bytes.py    its bytes, block by block
kv_tier.py      evicted blocks in a file          simulator.py      loads, simulated
turn.py         a request's part of a step        sampling_params.py  what a request may ask
session.py      the executor's interface          ort.py            ONNX Runtime: its options
streaming_session.py, functional_session.py       the two engine interfaces
sampling.py     the next tokens of a batch        logits.py         top-k, top-p, ... of a row
softmax.py      rows to probabilities, draws      entropy.py        entropy-bounded temperature
penalties.py    what came before                  logprobs.py       the model's own probabilities
grammar.py      JSON schema, regex, grammar       prompt_lookup.py  drafts from earlier in the text
text_codec.py   tokenizer.json                    chat.py           chat templates
detokenizer.py  tokens to text as they come       stop.py           stop strings
loading.py      engine directory -> its parts     build_cache.py    checkpoint -> cached engine
threads.py      how many cores                    fair_lock.py      first come, first served
"""

from __future__ import annotations

from .engine import SpikeEngine
from .engine_pool import EnginePool
from .kv_tier import TierOptions
from .logprobs import TokenLogprob
from .sampling_params import SamplingParams
from .scheduler import SchedulingPolicy
from .sequence import Completion, Piece, Timings
from .stats import EngineStats

__all__ = [
    "Completion",
    "EnginePool",
    "EngineStats",
    "Piece",
    "SamplingParams",
    "SchedulingPolicy",
    "SpikeEngine",
    "TierOptions",
    "Timings",
    "TokenLogprob",
]
