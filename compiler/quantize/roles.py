"""What a weight is for. The placement pass reads it off the graph: who consumes the tensor."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Roles that storage formats depend on. Stacked experts ([E, N, K]) have the roles of their
    dense counterparts; one constant that is both embedding and head is `TOKEN_EMBD` of a tied
    model."""

    TOKEN_EMBD = "token_embd"
    OUTPUT = "output"
    ATTN_Q = "attn_q"
    ATTN_K = "attn_k"
    ATTN_V = "attn_v"
    ATTN_QKV = "attn_qkv"
    """Query, key and value in one matrix."""
    ATTN_KV_B = "attn_kv_b"
    """Up-projection of a compressed key-value pair (MLA)."""
    ATTN_OUTPUT = "attn_output"
    FFN_GATE = "ffn_gate"
    FFN_UP = "ffn_up"
    FFN_GATE_UP = "ffn_gate_up"
    """Gate and up in one matrix."""
    FFN_DOWN = "ffn_down"
    ROUTER = "ffn_gate_inp"
    """Chooses experts, or weighs a shared one."""
    POSITION_EMBD = "position_embd"
    """Learned positions."""
    CONV = "conv"
    """A small convolution kernel."""
    NORM = "norm"
    BIAS = "bias"
    OTHER = "other"
    """A matrix of none of these roles."""


VALUE_LIKE = frozenset({Role.ATTN_V, Role.ATTN_QKV, Role.ATTN_KV_B})
"""Roles that carry attention values, the most sensitive part of attention."""

UNQUANTIZED = frozenset({Role.ROUTER, Role.POSITION_EMBD, Role.CONV, Role.NORM, Role.BIAS})
"""Roles that always stay f32: small, and errors in them spread."""
