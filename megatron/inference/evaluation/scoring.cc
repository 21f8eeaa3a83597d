#include "megatron/inference/evaluation/scoring.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/generator.h"
#include "megatron/tensor/torch.h"
#include "megatron/tensor_parallel/cross_entropy.h"
#include "megatron/transformer/layer/forward_context.h"

namespace megatron {
namespace {

// Maximum memory for fp32 logits at one time.
constexpr int64_t kLogitsBytes = int64_t{256} << 20;

std::span<const int32_t> inputs_of(const ScoreRequest& request) {
  return request.ids.first(request.ids.size() - 1);
}

// One row of a batch: an input and the requests that it answers.
struct ScoredRow {
  std::span<const int32_t> inputs;
  std::vector<size_t> requests;
  int64_t group = 0;
};

// A position in a batch whose next token is scored.
struct Target {
  int64_t place = 0;  // position * rows + row
  int64_t id = 0;
  size_t request = 0;
};

class Scorer {
 public:
  Scorer(Model& model, const ParallelGroups& groups, std::span<const ScoreRequest> requests,
         const ScoringOptions& options)
      : model_(model),
        groups_(groups),
        requests_(requests),
        options_(options),
        config_(model.config()),
        device_(model.parameters().front()->value.device()),
        logprobs_(requests.size(), 0.0),
        misses_(requests.size(), 0.0) {}

  std::vector<Score> run(const ScoringProgress& progress) {
    check();
    const std::vector<ScoredRow> rows = make_rows();
    const auto ranks = static_cast<size_t>(groups_.dp.size());
    size_t turn = 0, done = 0;
    for (size_t begin = 0; begin < rows.size();) {
      const size_t end = batch_end(rows, begin);
      const std::span<const ScoredRow> batch(rows.data() + begin, end - begin);
      if (turn % ranks == static_cast<size_t>(groups_.dp.rank())) forward(batch);
      for (const ScoredRow& row : batch) done += row.requests.size();
      if (++turn % ranks == 0 || end == rows.size())
        if (progress) progress(std::exchange(done, 0));
      begin = end;
    }
    return collect();
  }

 private:
  void check() const {
    const int64_t limit = max_positions(config_);
    for (size_t i = 0; i < requests_.size(); ++i) {
      const ScoreRequest& request = requests_[i];
      const auto length = static_cast<int64_t>(request.ids.size());
      MEGATRON_CHECK(request.num_scored >= 0 && request.num_scored < length, "request ", i,
                     " scores ", request.num_scored, " of ", length,
                     " token ids; the first needs one before it");
      MEGATRON_CHECK(limit < 0 || length - 1 <= limit, "request ", i, ": ", length - 1,
                     " token ids are beyond the model's ", limit, " positions");
      for (const int32_t id : request.ids)
        MEGATRON_CHECK((id >= 0 && id < config_.vocab_size) ||
                           std::ranges::find(options_.other_ids, id) != options_.other_ids.end(),
                       "request ", i, " has the token id ", id, ", the model's vocabulary has ",
                       config_.vocab_size);
    }
  }

  std::vector<ScoredRow> make_rows() const {
    std::vector<size_t> order(requests_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      if (requests_[a].group != requests_[b].group) return requests_[a].group < requests_[b].group;
      const auto x = inputs_of(requests_[a]), y = inputs_of(requests_[b]);
      if (x.size() != y.size()) return x.size() > y.size();
      const auto [p, q] = std::mismatch(x.begin(), x.end(), y.begin());
      return p == x.end() ? a < b : *p < *q;
    });
    std::vector<ScoredRow> rows;
    for (const size_t i : order) {
      if (requests_[i].num_scored == 0) continue;
      const auto inputs = inputs_of(requests_[i]);
      const int64_t group = requests_[i].group;
      if (rows.empty() || rows.back().group != group ||
          !std::ranges::equal(rows.back().inputs, inputs))
        rows.push_back({inputs, {}, group});
      rows.back().requests.push_back(i);
    }
    return rows;
  }

  // Longrope takes its frequencies by the length of the whole batch: rows on both sides of the
  // border do not mix.
  bool beyond_rope_border(const ScoredRow& row) const {
    const TransformerConfig& t = config_.transformer;
    return t.rope_scaling_type == RopeScaling::kLongRope &&
           static_cast<int64_t>(row.inputs.size()) > t.rope_original_max_position_embeddings;
  }

  size_t batch_end(const std::vector<ScoredRow>& rows, size_t begin) const {
    const auto longest = static_cast<int64_t>(rows[begin].inputs.size());
    const auto most = static_cast<size_t>(std::max<int64_t>(1, options_.batch_tokens / longest));
    size_t end = begin + 1;
    while (end < rows.size() && end - begin < most && rows[end].group == rows[begin].group &&
           beyond_rope_border(rows[end]) == beyond_rope_border(rows[begin]))
      ++end;
    return end;
  }

  void forward(std::span<const ScoredRow> batch) {
    const auto b = static_cast<int64_t>(batch.size());
    const int64_t unit = options_.row_multiple, longest = std::ssize(batch[0].inputs),
                  s = (longest + unit - 1) / unit * unit, limit = max_positions(config_);
    MEGATRON_CHECK(limit < 0 || s <= limit, longest, " token ids, filled up to ", s,
                   ", are beyond the model's ", limit, " positions");
    at::Tensor tokens = at::zeros({b, s}, at::kLong);  // no token attends to the padding
    std::vector<Target> targets;
    for (int64_t r = 0; r < b; ++r) {
      const ScoredRow& row = batch[static_cast<size_t>(r)];
      std::copy(row.inputs.begin(), row.inputs.end(), tokens.mutable_data_ptr<int64_t>() + r * s);
      const auto length = static_cast<int64_t>(row.inputs.size());
      for (const size_t i : row.requests)
        for (int64_t j = length - requests_[i].num_scored; j < length; ++j)
          targets.push_back({j * b + r, requests_[i].ids[static_cast<size_t>(j + 1)], i});
    }
    ForwardContext context;
    context.place.position = at::arange(s, at::kLong).to(device_);
    context.place.sample = at::zeros({b}, at::dtype(at::kLong).device(device_));
    Batch inputs;
    inputs.set("tokens", tokens.to(device_));
    inputs.place = context.place;
    if (options_.add_columns) {
      std::vector<std::span<const int32_t>> rows;
      for (const ScoredRow& row : batch) rows.push_back(row.inputs);
      options_.add_columns(rows, batch[0].group, inputs);
    }
    const at::Tensor hidden = model_.hidden(inputs, {}, context).front();
    const at::Tensor flat = hidden.reshape({s * b, 1, hidden.size(2)});
    const int64_t columns = config_.padded_vocab_size / groups_.tp.size();
    const auto chunk = static_cast<size_t>(
        std::max<int64_t>(16, kLogitsBytes / (int64_t{sizeof(float)} * columns)));
    for (size_t begin = 0; begin < targets.size(); begin += chunk)
      score_targets(flat,
                    std::span(targets).subspan(begin, std::min(chunk, targets.size() - begin)));
  }

  void score_targets(const at::Tensor& flat, std::span<const Target> targets) {
    const auto n = static_cast<int64_t>(targets.size());
    at::Tensor places = at::empty({n}, at::kLong), ids = at::empty({n, 1}, at::kLong);
    for (int64_t i = 0; i < n; ++i) {
      places.mutable_data_ptr<int64_t>()[i] = targets[static_cast<size_t>(i)].place;
      ids.mutable_data_ptr<int64_t>()[i] = targets[static_cast<size_t>(i)].id;
    }
    const at::Tensor logits = model_.logits(flat.index_select(0, places.to(device_)));
    const at::Tensor best = most_likely(logits.select(1, 0)).to(at::kCPU);
    const at::Tensor loss =
        vocab_parallel_cross_entropy(logits, ids.to(device_), config_.vocab_size, 0.0, groups_.tp)
            .to(at::kCPU)
            .to(at::kDouble)
            .contiguous();
    for (int64_t i = 0; i < n; ++i) {
      const Target& target = targets[static_cast<size_t>(i)];
      logprobs_[target.request] -= loss.const_data_ptr<double>()[i];
      if (best.const_data_ptr<int64_t>()[i] != target.id) misses_[target.request] += 1.0;
    }
  }

  // The id of the largest logit of each row [n, v/t], the smallest of equals. [n] int64
  at::Tensor most_likely(const at::Tensor& logits) const {
    const int64_t columns = logits.size(1), first = groups_.tp.rank() * columns;
    const int64_t valid = std::clamp<int64_t>(config_.vocab_size - first, 0, columns);
    // max() does not specify which of equal elements it returns.
    const auto first_of = [&](const at::Tensor& own, const at::Tensor& largest) {
      const at::Tensor index = at::arange(first, first + valid, logits.options().dtype(at::kLong));
      return at::where(own == largest.unsqueeze(1), index,
                       at::scalar_tensor(std::numeric_limits<int64_t>::max(), index.options()))
          .amin(1);
    };
    const at::Tensor own = logits.narrow(1, 0, valid);
    if (groups_.tp.size() == 1) return first_of(own, own.amax(1));
    const at::Tensor largest =
        valid > 0 ? own.amax(1).to(at::kFloat)
                  : at::full({logits.size(0)}, -std::numeric_limits<float>::infinity(),
                             logits.options().dtype(at::kFloat));
    groups_.tp.all_reduce(largest, ReduceOp::kMax)->wait();
    at::Tensor negative = valid > 0
                              ? first_of(own.to(at::kFloat), largest).neg()
                              : at::full({logits.size(0)}, -std::numeric_limits<int64_t>::max(),
                                         logits.options().dtype(at::kLong));
    groups_.tp.all_reduce(negative, ReduceOp::kMax)->wait();
    return negative.neg();
  }

  std::vector<Score> collect() {
    const auto n = static_cast<int64_t>(requests_.size());
    if (groups_.dp.size() > 1 && n > 0) {
      at::Tensor both = at::empty({2, n}, at::kDouble);
      std::copy(logprobs_.begin(), logprobs_.end(), both.mutable_data_ptr<double>());
      std::copy(misses_.begin(), misses_.end(), both.mutable_data_ptr<double>() + n);
      both = both.to(device_);
      groups_.dp.all_reduce(both)->wait();
      both = both.to(at::kCPU);
      std::copy_n(both.const_data_ptr<double>(), n, logprobs_.begin());
      std::copy_n(both.const_data_ptr<double>() + n, n, misses_.begin());
    }
    std::vector<Score> scores(requests_.size());
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = {logprobs_[i], misses_[i] == 0.0};
    return scores;
  }

  Model& model_;
  const ParallelGroups& groups_;
  std::span<const ScoreRequest> requests_;
  const ScoringOptions& options_;
  const ModelConfig& config_;
  const at::Device device_;
  std::vector<double> logprobs_, misses_;  // by request; zero if another rank has its row
};

}  // namespace

std::vector<Score> score(Model& model, const ParallelGroups& groups,
                         std::span<const ScoreRequest> requests, const ScoringOptions& options,
                         const ScoringProgress& progress) {
  const at::NoGradGuard no_grad;
  return Scorer(model, groups, requests, options).run(progress);
}

}  // namespace megatron
