// Every kind of link, and the one op of the domain "spike" that ONNX Runtime sees.
#pragma once

#include "ops/op.h"

namespace spike::ops {

const Op& linear_op();
const Op& embedding_op();
const Op& gated_mlp_op();
const Op& moe_op();
const Op& route_op();
const Op& qkv_op();
const Op& rms_norm_op();
const Op& rope_op();
const Op& attention_op();
const Op& head_op();
const Op& choose_op();

/// All of them.
std::span<const Op* const> all_ops();

/// Runs links one behind the other; see chain_run.cpp.
const OrtCustomOp* chain_op();

}  // namespace spike::ops
