// Every op of the domain "spike", version 1.
#pragma once

#include "ops/ort_api.h"

namespace spike::ops {

const OrtCustomOp* linear_op();
const OrtCustomOp* embedding_op();
const OrtCustomOp* gated_mlp_op();
const OrtCustomOp* moe_op();
const OrtCustomOp* route_op();
const OrtCustomOp* qkv_op();
const OrtCustomOp* rms_norm_op();
const OrtCustomOp* rope_op();
const OrtCustomOp* attention_op();
const OrtCustomOp* head_op();
const OrtCustomOp* choose_op();

}  // namespace spike::ops
