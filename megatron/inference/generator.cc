#include "megatron/inference/generator.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/layer/forward_context.h"
#include "megatron/transformer/layer/layer_state.h"

namespace megatron {
namespace {

// The device of a model's parameters.
at::Device device_of(Model& model) { return model.parameters().front()->value.device(); }

// One row on its way: its tokens, its text so far, and what may still become a stop string.
class GeneratedRow {
 public:
  GeneratedRow(const Tokenizer& tokenizer, const GenerateOptions& options)
      : options_(options),
        tokenizer_(tokenizer),
        decoder_(tokenizer),
        eod_(tokenizer.eod()),
        vocab_size_(tokenizer.vocab_size()) {}

  bool finished() const { return finished_; }

  // Adds a token; returns the text that is now final.
  std::string push(int32_t token) {
    const std::vector<int32_t>& stops = options_.stop_tokens;
    if ((options_.stop_at_eod && eod_ && token == *eod_) ||
        std::find(stops.begin(), stops.end(), token) != stops.end())
      return finish(FinishReason::kEndOfDocument);
    result.tokens.push_back(token);
    const bool shown =
        token < vocab_size_ && !(options_.skip_special_tokens && tokenizer_.is_special(token));
    if (shown) held_ += decoder_.push(token);  // models may have ids without text
    if (static_cast<int64_t>(result.tokens.size()) >= options_.tokens_to_generate) {
      std::string piece = release();
      return finished_ ? piece : piece + finish(FinishReason::kLength);
    }
    return release();
  }

  Generation result;

 private:
  std::string finish(FinishReason reason) {
    held_ += decoder_.finish();
    std::string piece = release();
    if (finished_) return piece;  // a stop string was completed
    finished_ = true;
    result.finish_reason = reason;
    result.text += held_;
    return piece + std::exchange(held_, {});
  }

  // Text before a stop string, or all but the longest end that could begin one.
  std::string release() {
    size_t cut = std::string::npos;
    for (const std::string& stop : options_.stop) cut = std::min(cut, held_.find(stop));
    size_t keep = 0;
    if (cut != std::string::npos) {
      finished_ = true;
      result.finish_reason = FinishReason::kStop;
    } else {
      for (const std::string& stop : options_.stop)
        for (size_t n = std::min(held_.size(), stop.size() - 1); n > keep; --n)
          if (held_.ends_with(std::string_view(stop).substr(0, n))) keep = n;
      cut = held_.size() - keep;
    }
    std::string piece = held_.substr(0, cut);
    held_.erase(0, finished_ ? held_.size() : cut);
    result.text += piece;
    return piece;
  }

  const GenerateOptions& options_;
  const Tokenizer& tokenizer_;
  StreamDecoder decoder_;
  std::optional<int32_t> eod_;
  int64_t vocab_size_;
  std::string held_;
  bool finished_ = false;
};

// Left-padded ids [b, s] and the number of padding positions per row.
struct PaddedBatch {
  at::Tensor tokens;
  std::vector<int64_t> padding;
};

PaddedBatch pad_left(const std::vector<GeneratedRow>& rows) {
  size_t longest = 0;
  for (const GeneratedRow& row : rows) longest = std::max(longest, row.result.prompt_tokens.size());
  PaddedBatch batch{
      at::zeros({static_cast<int64_t>(rows.size()), static_cast<int64_t>(longest)}, at::kLong), {}};
  auto ids = batch.tokens.accessor<int64_t, 2>();
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::vector<int32_t>& prompt = rows[i].result.prompt_tokens;
    const size_t pad = longest - prompt.size();
    batch.padding.push_back(static_cast<int64_t>(pad));
    for (size_t j = 0; j < prompt.size(); ++j)
      ids[static_cast<int64_t>(i)][static_cast<int64_t>(pad + j)] = prompt[j];
  }
  return batch;
}

// Logits of the last position of every row, [b, v] on the CPU.
at::Tensor forward_last(Model& model, const at::Tensor& tokens, DecodingState& state,
                        const at::Tensor& padding, at::Device device) {
  const int64_t b = tokens.size(0), s = tokens.size(1);
  ForwardContext context;
  context.decoding = &state;
  context.attention_mask = state.padding_mask(s, device);
  context.place.position = at::arange(state.length(), state.length() + s, at::kLong).to(device);
  context.place.sample = at::zeros({b}, at::dtype(at::kLong).device(device));
  context.position_ids =
      (context.place.position.unsqueeze(0) - padding.to(device).unsqueeze(1)).clamp_min(0);
  const at::Tensor logits = model.forward(tokens.to(device), context);
  state.advance(s);
  return logits.select(0, s - 1).to(at::kCPU);
}

std::vector<GeneratedRow> start_rows(const ModelConfig& config, const Tokenizer& tokenizer,
                                     std::span<const std::string> prompts,
                                     const GenerateOptions& options) {
  std::vector<GeneratedRow> rows;
  rows.reserve(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    GeneratedRow& row = rows.emplace_back(tokenizer, options);
    std::vector<int32_t>& ids = row.result.prompt_tokens;
    ids = tokenizer.encode(prompts[i]);
    if (ids.empty()) {
      MEGATRON_CHECK(tokenizer.eod(), "prompt ", i + 1,
                     " has no tokens and the tokenizer has no end-of-document token to start from");
      ids.push_back(*tokenizer.eod());
    }
    for (const int32_t id : ids)
      MEGATRON_CHECK(id < config.vocab_size, "prompt ", i + 1, " has the token id ", id,
                     ", the model's vocabulary has ", config.vocab_size);
    const int64_t limit = max_positions(config);
    const auto needed = static_cast<int64_t>(ids.size()) + options.tokens_to_generate;
    MEGATRON_CHECK(limit < 0 || needed <= limit, "prompt ", i + 1, " has ", ids.size(),
                   " tokens; with ", options.tokens_to_generate,
                   " to generate that is beyond the model's ", limit, " positions",
                   "\nhint: shorten the prompt or give --tokens-to-generate ",
                   std::max<int64_t>(0, limit - static_cast<int64_t>(ids.size())));
  }
  return rows;
}

// Whether a row's next token is the first beyond the original length of longrope: its keys are then
// rotated by other frequencies, and all of them are computed anew.
bool crosses_rope_border(const TransformerConfig& config, const std::vector<GeneratedRow>& rows,
                         int64_t step) {
  if (config.rope_scaling_type != RopeScaling::kLongRope) return false;
  return std::any_of(rows.begin(), rows.end(), [&](const GeneratedRow& row) {
    return static_cast<int64_t>(row.result.prompt_tokens.size()) + step ==
           config.rope_original_max_position_embeddings + 1;
  });
}

}  // namespace

int64_t max_positions(const ModelConfig& config) {
  return config.transformer.position_embedding_type == PositionEmbedding::kLearnedAbsolute
             ? config.transformer.max_position_embeddings
             : -1;
}

std::vector<Generation> generate(Model& model, const Tokenizer& tokenizer,
                                 std::span<const std::string> prompts,
                                 const GenerateOptions& options, const StreamCallback& stream) {
  const at::NoGradGuard no_grad;
  const ModelConfig& config = model.config();
  const at::Device device = device_of(model);
  std::vector<GeneratedRow> rows = start_rows(config, tokenizer, prompts, options);
  std::vector<Generation> results;
  if (options.tokens_to_generate > 0 && !rows.empty()) {
    const PaddedBatch batch = pad_left(rows);
    const at::Tensor padding = at::tensor(batch.padding, at::dtype(at::kLong));
    DecodingState state({batch.tokens.size(1) + options.tokens_to_generate, batch.padding});
    at::Tensor next = at::zeros({static_cast<int64_t>(rows.size()), 1}, at::kLong);
    at::Tensor tokens = batch.tokens, history = batch.tokens;
    for (int64_t step = 0; step < options.tokens_to_generate; ++step) {
      if (step > 0 && crosses_rope_border(config.transformer, rows, step)) {
        state.clear();
        tokens = history;
      }
      const at::Tensor logits = forward_last(model, tokens, state, padding, device);
      bool all_finished = true;
      for (size_t i = 0; i < rows.size(); ++i) {
        const auto r = static_cast<int64_t>(i);
        if (rows[i].finished()) continue;
        const auto position = static_cast<int64_t>(rows[i].result.prompt_tokens.size()) + step;
        const int64_t token =
            sample_token(logits[r], config.vocab_size, options.sampling, r, position);
        next[r][0] = token;
        const std::string piece = rows[i].push(static_cast<int32_t>(token));
        if (stream && !piece.empty()) stream(i, piece);
        all_finished &= rows[i].finished();
      }
      if (all_finished) break;
      tokens = next;
      if (config.transformer.rope_scaling_type == RopeScaling::kLongRope)
        history = at::cat({history, next}, 1);
    }
  }
  for (GeneratedRow& row : rows) results.push_back(std::move(row.result));
  return results;
}

at::Tensor full_logits(Model& model, std::span<const int32_t> ids) {
  const at::NoGradGuard no_grad;
  MEGATRON_CHECK(!ids.empty(), "no token ids were given");
  const ModelConfig& config = model.config();
  const int64_t limit = max_positions(config);
  const auto length = static_cast<int64_t>(ids.size());
  MEGATRON_CHECK(limit < 0 || length <= limit, length, " token ids are beyond the model's ", limit,
                 " positions");
  for (size_t i = 0; i < ids.size(); ++i)
    MEGATRON_CHECK(ids[i] >= 0 && ids[i] < config.vocab_size, "token id ", ids[i], " at index ", i,
                   " is outside the vocabulary of ", config.vocab_size);
  const at::Device device = device_of(model);
  const std::vector<int64_t> wide(ids.begin(), ids.end());
  const at::Tensor tokens = at::tensor(wide, at::dtype(at::kLong)).view({1, length}).to(device);
  ForwardContext context;
  context.place.position = at::arange(length, at::kLong).to(device);
  context.place.sample = at::zeros({1}, at::dtype(at::kLong).device(device));
  const at::Tensor logits = model.forward(tokens, context);
  const at::Tensor valid = logits.select(1, 0).narrow(-1, 0, config.vocab_size);
  return valid.to(at::kCPU)
      .to(valid.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
      .contiguous();
}

}  // namespace megatron
