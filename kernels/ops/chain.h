// Several ops of ours in one node of ONNX Runtime: what is made of its attribute (link_text.h).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ops/op.h"
#include "ops/ort_api.h"

namespace spike::ops {

struct Link {
  const Op* op = nullptr;
  std::vector<Operand> inputs;  ///< stored ones with their data
  std::vector<size_t> outputs;  ///< numbers of values
  std::unique_ptr<Kernel> kernel;
};

/// Where a value lies.
struct Place {
  static constexpr size_t none = static_cast<size_t>(-1);
  size_t output = none;  ///< of the node, or
  size_t slot = none;    ///< of scratch memory, or neither: an input of the node
};

/// The links of a node and where their values lie. Values that are never needed at the same time
/// share a slot.
class Chain {
 public:
  Chain(const OrtApi& api, const OrtKernelInfo* info);

  const std::vector<Link>& links() const { return links_; }
  const std::vector<Place>& places() const { return places_; }  ///< by number of a value
  size_t inputs() const { return inputs_; }
  /// "spike.Linear 'chain.0:7'": a link by its op, its node and its number.
  std::string name_of(size_t link) const;

 private:
  void add(const OrtApi& api, const OrtKernelInfo* info, LinkText& text);
  void place(const std::vector<size_t>& outputs);

  std::string node_;
  std::vector<Link> links_;
  std::vector<Place> places_;
  size_t inputs_ = 0, slots_ = 0;
};

}  // namespace spike::ops
