#include "ops/chain.h"

#include <algorithm>
#include <exception>

#include "ops/ops.h"
#include "ops/ort_values.h"

namespace spike::ops {
namespace {

const Op& find_op(const std::string& name) {
  for (const Op* op : all_ops())
    if (name == op->declaration.name) return *op;
  throw Failure("there is no op '" + name + "'");
}

/// The number behind the last of the values that no link makes: how many inputs the node needs.
size_t count_inputs(const std::vector<LinkText>& links) {
  std::vector<bool> made;
  size_t count = 0;
  for (const LinkText& link : links) {
    for (const Operand& input : link.inputs) {
      if (input.kind != Operand::Kind::value) continue;
      if (input.value >= made.size() || !made[input.value]) count = std::max(count, input.value + 1);
    }
    for (size_t output : link.outputs) {
      if (output >= made.size()) made.resize(output + 1);
      if (made[output]) throw Failure("%" + std::to_string(output) + " is made twice");
      made[output] = true;
    }
  }
  const auto first = std::find(made.begin(), made.end(), true) - made.begin();
  if (static_cast<size_t>(first) < count)
    throw Failure("%" + std::to_string(count - 1) + " is read before it is made");
  return count;
}

/// A stored operand's view, within the weights.
Tensor view(const Tensor& weights, const Operand& operand) {
  Tensor tensor = operand.tensor;
  const size_t bytes = static_cast<size_t>(tensor.elements()) * element_bytes(tensor.type);
  const size_t all = weights.data == nullptr ? 0 : static_cast<size_t>(weights.elements());
  if (weights.type != ORT_U8 || operand.offset > all || bytes > all - operand.offset)
    throw Failure("a constant at " + std::to_string(operand.offset) + " of " +
                  std::to_string(bytes) + " bytes lies outside the weights");
  tensor.data = weights.as<std::byte>() + operand.offset;
  return tensor;
}

void check_ports(const Declaration& op, const LinkText& link) {
  const auto needed = std::ranges::count(op.inputs, false, &Port::optional);
  bool fits = link.inputs.size() <= op.inputs.size() && link.outputs.size() == op.outputs.size() &&
              link.inputs.size() >= static_cast<size_t>(needed);
  for (size_t i = 0; fits && i < link.inputs.size(); ++i)
    fits = op.inputs[i].optional || link.inputs[i].kind != Operand::Kind::missing;
  if (!fits)
    throw Failure("has " + std::to_string(link.inputs.size()) + " inputs and " +
                  std::to_string(link.outputs.size()) + " outputs that don't fit");
}

/// For each value the link that reads it last.
std::vector<size_t> last_readers(const std::vector<Link>& links, size_t values) {
  std::vector<size_t> last(values, 0);
  for (size_t i = 0; i < links.size(); ++i) {
    for (const Operand& input : links[i].inputs)
      if (input.kind == Operand::Kind::value) last[input.value] = i;
    for (size_t output : links[i].outputs) last[output] = i;  // who makes it needs it as well
  }
  return last;
}

}  // namespace

Chain::Chain(const OrtApi& api, const OrtKernelInfo* info) : node_(node_name(api, info)) {
  ChainText text = read_chain(string_attribute(api, info, "links"));
  if (text.links.empty()) throw Failure("no link");
  inputs_ = count_inputs(text.links);
  for (LinkText& link : text.links) add(api, info, link);
  place(text.outputs);
}

void Chain::add(const OrtApi& api, const OrtKernelInfo* info, LinkText& text) try {
  const Op& op = find_op(text.op);
  check_ports(op.declaration, text);
  std::vector<Tensor> constants;
  for (Operand& operand : text.inputs) {
    if (operand.kind == Operand::Kind::stored)
      operand.tensor = view(constant_input(api, info, 0), operand);
    const bool given = operand.kind == Operand::Kind::value && operand.value < inputs_;
    constants.push_back(given ? constant_input(api, info, operand.value) : operand.tensor);
  }
  auto kernel = op.make(Info(text, constants));
  links_.push_back({&op, std::move(text.inputs), std::move(text.outputs), std::move(kernel)});
} catch (const std::exception& e) {
  throw Failure("spike." + text.op + " '" + node_ + "': " + e.what());
}

void Chain::place(const std::vector<size_t>& outputs) {
  size_t values = inputs_;
  for (const Link& link : links_)
    for (size_t output : link.outputs) values = std::max(values, output + 1);
  places_.resize(values);
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (outputs[i] < inputs_ || outputs[i] >= values)
      throw Failure("%" + std::to_string(outputs[i]) + " is returned, but no link makes it");
    places_[outputs[i]].output = i;
  }
  const std::vector<size_t> last = last_readers(links_, values);
  std::vector<size_t> free;
  for (size_t i = 0; i < links_.size(); ++i) {
    for (size_t value : links_[i].outputs) {
      if (places_[value].output != Place::none) continue;
      if (free.empty()) free.push_back(slots_++);
      places_[value].slot = free.back();
      free.pop_back();
    }
    for (size_t value = inputs_; value < values; ++value)
      if (last[value] == i && places_[value].slot != Place::none) free.push_back(places_[value].slot);
  }
}

std::string Chain::name_of(size_t link) const {
  const std::string number = links_.size() > 1 ? ":" + std::to_string(link) : "";
  return std::string("spike.") + links_[link].op->declaration.name + " '" + node_ + number + "'";
}

}  // namespace spike::ops
