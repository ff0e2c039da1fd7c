#include "core/format.h"

#include "core/short_block.h"

namespace spike {
namespace {

struct Traits {
  Format format;
  std::string_view name;
  int64_t elements;  // per block
  size_t bytes;      // per block
  size_t head = 0;   // of a short block, where the format has one
  size_t group = 0;  // and of each 64 elements in it
};

template <class B>
constexpr Traits block(Format format, std::string_view name) {
  if constexpr (ShortTraits<B>::kShort)
    return {format, name, B::kElements, sizeof(B), kHeadBytes<B>, kGroupBytes<B>};
  else
    return {format, name, B::kElements, sizeof(B)};
}

// In the order of enum Format.
constexpr Traits kTraits[] = {
    {Format::f32, "f32", 1, 4},
    {Format::f16, "f16", 1, 2},
    {Format::bf16, "bf16", 1, 2},
    block<BlockQ8_0>(Format::q8_0, "q8_0"),
    block<BlockQ5_0>(Format::q5_0, "q5_0"),
    block<BlockQ5_1>(Format::q5_1, "q5_1"),
    block<BlockQ4_0>(Format::q4_0, "q4_0"),
    block<BlockQ4_1>(Format::q4_1, "q4_1"),
    block<BlockQ2K>(Format::q2_k, "q2_k"),
    block<BlockQ3K>(Format::q3_k, "q3_k"),
    block<BlockQ4K>(Format::q4_k, "q4_k"),
    block<BlockQ5K>(Format::q5_k, "q5_k"),
    block<BlockQ6K>(Format::q6_k, "q6_k"),
    block<BlockInt4Sym>(Format::int4_sym, "int4_sym"),
};

const Traits& traits(Format format) { return kTraits[static_cast<int>(format)]; }

}  // namespace

std::optional<Format> parse_format(std::string_view name) {
  for (const Traits& t : kTraits)
    if (t.name == name) return t.format;
  return std::nullopt;
}

std::string_view format_name(Format format) { return traits(format).name; }

int64_t block_elements(Format format) { return traits(format).elements; }

int64_t row_multiple(Format format) { return traits(format).group > 0 ? 64 : block_elements(format); }

size_t row_bytes(Format format, int64_t k) {
  const Traits& t = traits(format);
  const size_t whole = static_cast<size_t>(k / t.elements) * t.bytes;
  const size_t groups = static_cast<size_t>(k % t.elements / 64);
  return whole + (groups > 0 ? t.head + groups * t.group : 0);
}

size_t packed_bytes(Format format, int64_t n, int64_t k) {
  const int64_t tiles = (n + kTileRows - 1) / kTileRows;
  return static_cast<size_t>(tiles * kTileRows) * row_bytes(format, k);
}

}  // namespace spike
