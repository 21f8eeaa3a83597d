// Rows of the table for attention over a paged cache.
#include <string>

#include "megatron/tensor/attention/paged_attention.h"
#include "megatron/tensor/torch.h"
#include "tests/kernels/cases.h"

namespace megatron {
namespace {

struct PagedShape {
  int64_t sequences, longest, heads, groups, key_size, value_size;
  AttentionOptions options;
  int64_t of_text = 1;  // so many sequences are positions behind each other of one text
};

constexpr int64_t kBlockSize = 16;

int64_t blocks_of(const PagedShape& shape) { return (shape.longest + kBlockSize - 1) / kBlockSize; }

// Text i has its last token behind longest / (i + 1) positions; blocks lie mingled.
PagedRows paged_rows(const PagedShape& shape, at::Device device) {
  std::vector<RaggedPart> parts;
  for (int64_t i = 0; i < shape.sequences; ++i) {
    std::vector<int32_t> blocks;
    const int64_t text = i / shape.of_text, behind = shape.of_text - 1 - i % shape.of_text;
    for (int64_t j = 0; j < blocks_of(shape); ++j)
      blocks.push_back(static_cast<int32_t>(j * shape.sequences + (text + j) % shape.sequences));
    parts.push_back({shape.longest / (text + 1) - 1 - behind, 1, std::move(blocks)});
  }
  return {std::move(parts), shape.sequences * blocks_of(shape), kBlockSize, device};
}

// softmax(scale q k^T) v of each sequence by itself.
at::Tensor plain_attention(const PagedShape& shape, const Tensors& t) {
  const PagedRows rows = paged_rows(shape, at::kCPU);
  const int64_t r = shape.heads / shape.groups;
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i < rows.parts().size(); ++i) {
    const RaggedPart& part = rows.parts()[i];
    const at::Tensor blocks = at::tensor(part.blocks).to(at::kLong);
    const auto positions = [&](const at::Tensor& pool) {
      const int64_t end = part.first + 1, left = shape.options.window_left;
      const int64_t first = left < 0 ? 0 : std::max<int64_t>(0, part.first - left);
      return pool.index_select(0, blocks)
          .flatten(0, 1)
          .slice(0, first, end)
          .repeat_interleave(r, 1);
    };
    const at::Tensor k = positions(t[1]), v = positions(t[2]);
    at::Tensor scores =
        at::einsum("nd,pnd->np", {t[0][static_cast<int64_t>(i)], k}) * shape.options.scale;
    if (const double cap = shape.options.softcap; cap > 0) scores = cap * (scores / cap).tanh();
    if (t.size() > 3) scores = at::cat({scores, t[3].unsqueeze(1)}, 1);
    const at::Tensor probs = scores.softmax(-1).narrow(1, 0, k.size(0));
    outs.push_back(at::einsum("np,pnv->nv", {probs, v}));
  }
  return at::stack(outs);
}

KernelCase paged_case(const PagedShape& shape, at::ScalarType type, bool sinks = false) {
  KernelCase row;
  row.name = std::string("paged_attention_") + c10::toString(type) + "_" +
             std::to_string(shape.sequences) + "x" + std::to_string(shape.longest) + "_" +
             std::to_string(shape.heads) + "_" + std::to_string(shape.groups) + "_" +
             std::to_string(shape.key_size) + "_" + std::to_string(shape.value_size) +
             (shape.options.window_left >= 0 ? "_window" : "") +
             (shape.options.softcap > 0 ? "_capped" : "") + (sinks ? "_sinks" : "") +
             (shape.of_text > 1 ? "_texts" : "");
  row.type = type;
  row.inputs = [=] {
    const int64_t blocks = shape.sequences * blocks_of(shape);
    Tensors all = {normal({shape.sequences, shape.heads, shape.key_size}, type, 1),
                   normal({blocks, kBlockSize, shape.groups, shape.key_size}, type, 2),
                   normal({blocks, kBlockSize, shape.groups, shape.value_size}, type, 3)};
    if (sinks) all.push_back(normal({shape.heads}, type, 4));
    return all;
  };
  row.run = [=](const Tensors& t) {
    AttentionOptions options = shape.options;
    if (t.size() > 3) options.sinks = t[3];
    return Tensors{
        paged_attention(t[0], {t[1]}, {t[2]}, paged_rows(shape, t[0].device()), options)};
  };
  row.reference = [=](const Tensors& t) { return Tensors{plain_attention(shape, t)}; };
  row.tolerance = tolerance_of(type);
  for (int64_t i = 0; i < shape.sequences; ++i)
    row.bytes += shape.longest / (i + 1) * shape.groups * (shape.key_size + shape.value_size) *
                 static_cast<int64_t>(c10::elementSize(type));
  return row;
}

AttentionOptions options_of(double scale, double softcap, int64_t window_left) {
  AttentionOptions options;
  options.scale = scale;
  options.softcap = softcap;
  options.window_left = window_left;
  return options;
}

}  // namespace

void add_paged_cases(std::vector<KernelCase>& rows, bool perf) {
  const AttentionOptions plain = options_of(0.1, 0.0, -1);
  if (perf) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16})
      rows.push_back(paged_case({16, 4096, 32, 8, 128, 128, plain}, type));
    rows.push_back(paged_case({1, 4096, 32, 8, 128, 128, plain}, at::kBFloat16));
    rows.push_back(paged_case({256, 2048, 32, 8, 128, 128, plain}, at::kBFloat16));
    return;
  }
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    rows.push_back(paged_case({1, 1, 1, 1, 1, 1, plain}, type));
    rows.push_back(paged_case({5, 70, 4, 2, 64, 64, plain}, type));
    rows.push_back(paged_case({3, 130, 6, 3, 80, 80, options_of(0.1, 5.0, 20)}, type));
    rows.push_back(paged_case({2, 33, 2, 2, 256, 192, options_of(0.1, 0.0, 0)}, type));
    rows.push_back(paged_case({5, 70, 4, 2, 64, 64, options_of(0.1, 0.0, 30)}, type, true));
    rows.push_back(paged_case({2, 90, 4, 1, 576, 512, options_of(0.05, 0.0, -1)}, type));
    // Heads of a group in one tile of 16, in several, and positions in several blocks of threads
    rows.push_back(paged_case({1, 900, 8, 2, 128, 128, options_of(0.1, 0.0, -1)}, type, true));
    rows.push_back(paged_case({3, 400, 20, 1, 96, 96, options_of(0.1, 3.0, 150)}, type));
    rows.push_back(paged_case({40, 200, 6, 6, 256, 256, options_of(0.05, 0.0, -1)}, type));
    // Rows of one text in one tile: all 16 queries, 10 of one row, 15, a remainder, in a window
    rows.push_back(paged_case({24, 300, 8, 2, 128, 128, plain, 8}, type, true));
    rows.push_back(paged_case({40, 300, 20, 2, 256, 256, plain, 8}, type));
    rows.push_back(paged_case({10, 100, 10, 2, 64, 64, plain, 5}, type));
    rows.push_back(paged_case({64, 150, 4, 4, 64, 64, options_of(0.1, 3.0, 20), 32}, type));
  }
}

}  // namespace megatron
