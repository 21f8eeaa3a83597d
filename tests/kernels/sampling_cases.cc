// Rows of the table for drawing tokens: every row of a batch is drawn in another way, and what is
// drawn and its log-probabilities equal a sort of the whole vocabulary in fp64.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "megatron/kernels/philox.h"
#include "megatron/tensor/decoding/sampling.h"
#include "megatron/tensor/torch.h"
#include "tests/kernels/cases.h"

namespace megatron {
namespace {

constexpr double kNone = -std::numeric_limits<double>::infinity();
constexpr int64_t kTop = 7;

// The same for every size of the vocabulary, but for ids.
SamplingBatch batch_of(int64_t vocab, at::Device device) {
  SamplingBatch batch;
  const auto add = [&](auto change) {
    SamplingRow row;
    row.key = 1000 + batch.rows.size();
    row.position = 17 * static_cast<int64_t>(batch.rows.size());
    change(row);
    batch.rows.push_back(row);
  };
  add([](SamplingRow& r) { r.temperature = 0.0; });
  add([](SamplingRow&) {});
  add([](SamplingRow& r) { r.temperature = 0.7, r.top_k = 5; });
  add([](SamplingRow& r) { r.top_p = 0.6; });
  add([](SamplingRow& r) { r.has_min_p = 1, r.log_min_p = std::log(0.2); });
  add([](SamplingRow& r) { r.temperature = 2.5, r.top_k = 40, r.top_p = 0.9; });
  add([](SamplingRow& r) { r.top_p = 0.0; });
  add([](SamplingRow& r) { r.top_k = 1, r.position = (int64_t{1} << 32) - 1; });
  add([](SamplingRow& r) { r.temperature = 1e-30; });
  add([](SamplingRow& r) { r.top_k = 1 << 30, r.top_p = 0.999999; });
  add([&](SamplingRow& r) {
    r.num_edits = 3;
    batch.edit_ids = {0, static_cast<int32_t>(vocab - 1), static_cast<int32_t>(vocab / 2)};
    batch.edit_values = {2.0f, -std::numeric_limits<float>::infinity(), -3.5f};
  });
  add([](SamplingRow& r) {
    r.counts = 1, r.repetition_penalty = 1.3, r.presence_penalty = 0.5, r.frequency_penalty = 0.25;
  });
  add([](SamplingRow& r) {
    r.counts = 0, r.mask = 0, r.repetition_penalty = 0.8;
    r.temperature = 0.0;
  });
  const auto words = static_cast<size_t>((vocab + 31) / 32);
  for (size_t i = 0; i < words; ++i) batch.masks.push_back(0x5a5a5a5au + static_cast<uint32_t>(i));
  add([](SamplingRow& r) { r.mask = 1; });  // nothing is allowed
  batch.masks.resize(2 * words, 0);
  batch.counts = at::arange(2 * vocab, at::kInt).remainder(7).sub(3).clamp_min(0).view({2, vocab});
  batch.counts = batch.counts.to(device);
  return batch;
}

double noise(const SamplingRow& row, int64_t id) {
  uint32_t words[64];
  philox_words_cpu(row.key,
                   (static_cast<uint64_t>(row.position) << 32) + static_cast<uint64_t>(id) / 4, 0,
                   0, 1, words);
  const double t = (words[id % 4] + 0.5) / 4294967296.0;
  return -std::log(-std::log1p(-t));
}

// One row, by the order of the whole vocabulary.
struct Sorted {
  std::vector<double> x;
  std::vector<int64_t> order;  // falling logits, then rising ids; those that are kept first
  size_t kept = 0;

  explicit Sorted(std::vector<double> values) : x(std::move(values)), order(x.size()) {
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int64_t a, int64_t b) { return at(a) > at(b); });
    while (kept < order.size() && at(order[kept]) > kNone) ++kept;
  }
  double at(int64_t id) const { return x[static_cast<size_t>(id)]; }
  double share(size_t i, double temperature) const {
    return std::exp((at(order[i]) - at(order[0])) / temperature);
  }
  void keep(const SamplingRow& row) {
    if (row.top_k > 0) kept = std::min<size_t>(kept, static_cast<size_t>(row.top_k));
    double total = 0, sum = 0;
    for (size_t i = 0; i < kept; ++i) total += share(i, row.temperature);
    for (size_t i = 0; row.top_p < 1.0 && i < kept; ++i) {
      sum += share(i, row.temperature);
      if (sum >= row.top_p * total) kept = i + 1;
    }
    for (size_t i = 0; row.has_min_p != 0 && i < kept; ++i)
      if (share(i, row.temperature) < std::exp(row.log_min_p)) kept = i;
  }
  int64_t draw(const SamplingRow& row) const {
    int64_t best = -1;
    double most = kNone;
    for (size_t i = 0; i < kept; ++i) {
      const int64_t id = order[i];
      const double value =
          row.temperature > 0.0 ? at(id) / row.temperature + noise(row, id) : at(id);
      if (value > most || (value == most && id < best)) {
        best = id;
        most = value;
      }
    }
    return best;
  }
  // Of the chosen id, then of the largest kept ones, then their ids.
  std::vector<double> report(int64_t chosen, double temperature) const {
    double total = 0;
    for (size_t i = 0; i < kept; ++i) total += share(i, temperature);
    const auto logarithm = [&](int64_t id) {
      return id < 0 ? 0.0 : (at(id) - at(order[0])) / temperature - std::log(total);
    };
    std::vector<double> numbers = {logarithm(chosen)}, ids;
    for (size_t i = 0; i < kTop; ++i) {
      numbers.push_back(i < kept ? logarithm(order[i]) : 0.0);
      ids.push_back(i < kept ? static_cast<double>(order[i]) : -1.0);
    }
    numbers.insert(numbers.end(), ids.begin(), ids.end());
    return numbers;
  }
};

std::vector<double> processed(const SamplingBatch& batch, const SamplingRow& row,
                              std::vector<double> x) {
  for (int32_t i = row.first_edit; i < row.first_edit + row.num_edits; ++i)
    x[static_cast<size_t>(batch.edit_ids[static_cast<size_t>(i)])] +=
        batch.edit_values[static_cast<size_t>(i)];
  const at::Tensor counts = batch.counts.to(at::kCPU);
  const size_t words = batch.masks.size() / 2;
  for (size_t id = 0; id < x.size(); ++id) {
    if (row.counts >= 0) {
      const int32_t count = counts[row.counts][static_cast<int64_t>(id)].item<int32_t>();
      const double r = row.repetition_penalty;
      if (count > 0) x[id] = x[id] > 0 ? x[id] / r : x[id] * r;
      if (count > 1) x[id] -= row.presence_penalty;
      x[id] -= row.frequency_penalty * (count / 2);
    }
    if (row.mask < 0) continue;
    const uint32_t word = batch.masks[static_cast<size_t>(row.mask) * words + id / 32];
    if ((word >> (id % 32) & 1u) == 0) x[id] = kNone;
  }
  return x;
}

Tensors sort_and_draw(int64_t vocab, const Tensors& t) {
  const SamplingBatch batch = batch_of(vocab, at::kCPU);
  std::vector<int64_t> ids;
  std::vector<at::Tensor> raw, drawn;
  at::Tensor counts = batch.counts.clone();
  for (size_t i = 0; i < batch.rows.size(); ++i) {
    const SamplingRow& row = batch.rows[i];
    const at::Tensor logits =
        t[0][static_cast<int64_t>(i)].narrow(0, 0, vocab).to(at::kDouble).contiguous();
    const std::vector<double> x(logits.data_ptr<double>(), logits.data_ptr<double>() + vocab);
    Sorted sorted(processed(batch, row, x));
    if (row.temperature > 0.0) sorted.keep(row);
    ids.push_back(sorted.draw(row));
    raw.push_back(at::tensor(Sorted(x).report(std::max<int64_t>(0, ids.back()), 1.0)));
    drawn.push_back(
        at::tensor(sorted.report(ids.back(), row.temperature > 0.0 ? row.temperature : 1.0)));
    if (row.counts >= 0) counts[row.counts][ids.back()].add_(2);
  }
  return {at::tensor(ids), at::stack(raw), at::stack(drawn), counts};
}

at::Tensor numbers_of(const LogProbabilities& p, const at::Tensor& ids) {
  const at::Tensor none = at::zeros_like(p.top);
  return at::cat({at::where(ids.lt(0), at::zeros_like(p.chosen), p.chosen).unsqueeze(1),
                  at::where(p.top_ids.lt(0), none, p.top), p.top_ids.to(p.top.scalar_type())},
                 1);
}

KernelCase sampling_case(int64_t vocab, at::ScalarType type, double step) {
  KernelCase row;
  row.name = std::string("sampling_") + c10::toString(type) + "_" + std::to_string(vocab) +
             (step > 0 ? "_ties" : "");
  row.type = type;
  row.inputs = [=] {
    const auto rows = static_cast<int64_t>(batch_of(vocab, at::kCPU).rows.size());
    at::Tensor logits = normal({rows, vocab + 3}, type, 5, 3.0);
    if (step > 0) logits = logits.div(step).round().mul(step);
    logits.narrow(1, vocab, 3).fill_(100.0);  // padding
    return Tensors{logits};
  };
  row.run = [=](const Tensors& t) {
    const SamplingBatch batch = batch_of(vocab, t[0].device());
    VocabularyLogits logits(t[0], vocab);
    const at::Tensor ids = logits.draw(batch), known = ids.clamp_min(0);
    const at::Tensor all = at::arange(ids.size(0), ids.options());
    return Tensors{ids, numbers_of(logits.log_probabilities(known, kTop), known),
                   numbers_of(logits.at_rows(all).drawn_log_probabilities(known, kTop), ids),
                   batch.counts};
  };
  row.reference = [=](const Tensors& t) { return sort_and_draw(vocab, t); };
  row.tolerance = 2e-6;
  row.bit_equal = type == at::kFloat;
  return row;
}

}  // namespace

void add_sampling_cases(std::vector<KernelCase>& rows, bool perf) {
  if (perf) return;
  for (const at::ScalarType type : {at::kFloat, at::kDouble})
    for (const int64_t vocab : {33, 1000, 5003}) {
      rows.push_back(sampling_case(vocab, type, 0.0));
      rows.push_back(sampling_case(vocab, type, 0.5));
    }
}

}  // namespace megatron
