"""Memory of one full step, as the report shows it."""

from __future__ import annotations

from ...passes.memory_plan import plan_memory
from ..ir import Graph
from .request import BuildRequest

NOTE = "temporaries of a full step; the backend's arena and scratch inside kernels come on top"


def memory_report(graph: Graph, request: BuildRequest, max_seq_len: int) -> dict[str, object]:
    """Peak of the memory plan of a placed graph, and what bounds it, both in bytes.

    A full step has `max_num_tokens` tokens; with streaming, of `max_batch_size` sequences that ask
    for one row of logits each; without, of one sequence at the end of its cache, and every row.
    A graph traced for steps of one token has one.
    """
    tokens = request.max_num_tokens
    if request.enable_streaming:
        batch = request.max_batch_size
        blocks = -(-max_seq_len // request.tokens_per_block)
        sizes = {"T": tokens, "B": batch, "B1": batch + 1, "M": blocks, "R": batch}
    else:
        tokens = 1 if graph.is_stepwise else min(tokens, max_seq_len)
        sizes = {"B": 1, "S": tokens, "P": max_seq_len - tokens}
    try:
        plan = plan_memory(graph, sizes)
    except ValueError as error:
        return {"not planned": str(error)}
    return {
        "tokens": tokens,
        "peak": plan.peak,
        "lower bound": plan.lower_bound,
        "buffers": len(plan.buffers),
        "note": NOTE,
    }
