#include "ops/link_text.h"

#include <charconv>

namespace spike::ops {
namespace {

/// The next piece up to the separator, which is dropped from the rest.
std::string_view cut(std::string_view& rest, char separator) {
  const size_t end = rest.find(separator);
  const std::string_view piece = rest.substr(0, end);
  rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  return piece;
}

template <class Int>
Int read_number(std::string_view text, std::string_view word) {
  Int value = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fault != std::errc() || end != text.data() + text.size() || value < 0)
    throw Failure("'" + std::string(word) + "' can't be read");
  return value;
}

constexpr size_t most_values = 1 << 20;

size_t read_value(std::string_view word) {
  const bool marked = !word.empty() && word[0] == '%';
  const auto value = read_number<size_t>(marked ? word.substr(1) : "", word);
  if (value >= most_values) throw Failure("'" + std::string(word) + "': too many values");
  return value;
}

/// "4096:f32[64,2]", behind the @.
Operand read_stored(std::string_view text, std::string_view word) {
  Operand operand{Operand::Kind::stored, 0, 0, {}};
  operand.offset = read_number<size_t>(cut(text, ':'), word);
  const std::string_view type = cut(text, '[');
  if (type != "u8" && type != "f32") throw Failure("'" + std::string(word) + "' can't be read");
  operand.tensor.type = type == "u8" ? ORT_U8 : ORT_F32;
  std::string_view dims = cut(text, ']');
  while (!dims.empty()) {
    if (operand.tensor.rank == Tensor::max_rank)
      throw Failure("'" + std::string(word) + "' has too many dims");
    operand.tensor.dims[operand.tensor.rank++] = read_number<int64_t>(cut(dims, ','), word);
  }
  return operand;
}

Operand read_operand(std::string_view word) {
  if (word == "-") return {};
  if (word[0] == '@') return read_stored(word.substr(1), word);
  return {Operand::Kind::value, read_value(word), 0, {}};
}

LinkText read_link(std::string_view line) {
  LinkText link;
  std::string_view word = cut(line, ' ');
  for (; word != "=" && !line.empty(); word = cut(line, ' '))
    link.outputs.push_back(read_value(word));
  link.op = cut(line, ' ');
  while (!line.empty()) {
    word = cut(line, ' ');
    const size_t equals = word.find('=');
    if (word.empty()) throw Failure("an empty word in a link of " + link.op);
    if (equals == std::string_view::npos)
      link.inputs.push_back(read_operand(word));
    else
      link.attributes.emplace(word.substr(0, equals), word.substr(equals + 1));
  }
  return link;
}

}  // namespace

ChainText read_chain(std::string_view text) {
  ChainText chain;
  while (!text.empty()) {
    std::string_view line = cut(text, '\n');
    if (!line.starts_with("return")) {
      chain.links.push_back(read_link(line));
      continue;
    }
    cut(line, ' ');
    while (!line.empty()) chain.outputs.push_back(read_value(cut(line, ' ')));
  }
  return chain;
}

}  // namespace spike::ops
