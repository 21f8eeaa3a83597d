#include "megatron/inference/generator.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
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
      return finish(FinishReason::kEndToken);
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
      result.finish_reason = FinishReason::kStopText;
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

// Sequences on their way through one model and one paged cache: each step is one forward over the
// tokens that are new.
class Decoder {
 public:
  Decoder(Model& model, size_t sequences)
      : model_(model), device_(device_of(model)), sequences_(sequences) {}

  // Adds tokens at the end of a sequence, for the next step.
  void push(size_t sequence, std::span<const int32_t> tokens) {
    std::vector<int32_t>& ids = sequences_[sequence].ids;
    ids.insert(ids.end(), tokens.begin(), tokens.end());
  }
  // Takes a sequence out of the batch and frees its blocks.
  void finish(size_t sequence) {
    std::vector<int32_t>& blocks = sequences_[sequence].blocks;
    free_.insert(free_.end(), blocks.begin(), blocks.end());
    sequences_[sequence] = {};
  }

  struct Step {
    std::vector<size_t> sequences;  // those with new tokens
    at::Tensor logits;              // after the last token of each, [sequences, v]
  };
  Step step() {
    Step result{in_order(), {}};
    std::vector<int64_t> ids;
    std::vector<RaggedPart> parts;
    std::vector<int64_t> slots;
    for (const size_t i : result.sequences) {
      Sequence& s = sequences_[i];
      if (crosses_rope_border(s)) s.done = 0;
      const auto end = static_cast<int64_t>(s.ids.size());
      reserve(s, end);
      ids.insert(ids.end(), s.ids.begin() + s.done, s.ids.end());
      parts.push_back({s.done, end - s.done, s.blocks});
      slots.push_back(static_cast<int64_t>(i));
      s.done = end;
    }
    const RaggedBatch batch{PagedRows(std::move(parts), num_blocks_, kBlockSize, device_),
                            std::move(slots), static_cast<int64_t>(sequences_.size())};
    const DecodingPass decoding{state_, batch};
    ForwardContext context;
    context.decoding = &decoding;
    context.place = {at::zeros({1}, at::dtype(at::kLong).device(device_)), batch.rows.positions};
    context.position_ids = batch.rows.positions.unsqueeze(0);
    const at::Tensor tokens = at::tensor(ids, at::kLong).unsqueeze(0).to(device_);
    const at::Tensor hidden = model_.hidden(tokens, {}, context);
    result.logits = model_.logits(hidden.index_select(0, batch.rows.last_rows)).squeeze(1);
    return result;
  }

 private:
  static constexpr int64_t kBlockSize = 64;
  struct Sequence {
    std::vector<int32_t> ids, blocks;
    int64_t done = 0;  // positions that the cache holds
  };

  // Those with new tokens, those with one first.
  std::vector<size_t> in_order() const {
    std::vector<size_t> found;
    const auto waiting = [&](size_t i) {
      return static_cast<int64_t>(sequences_[i].ids.size()) - sequences_[i].done;
    };
    for (size_t i = 0; i < sequences_.size(); ++i)
      if (waiting(i) > 0) found.push_back(i);
    std::ranges::stable_partition(
        found, [&](size_t i) { return waiting(i) == 1 && !crosses_rope_border(sequences_[i]); });
    return found;
  }

  // Whether the next token is the first beyond the original length of longrope: keys are then
  // rotated by other frequencies, and all of them are computed anew.
  bool crosses_rope_border(const Sequence& s) const {
    const TransformerConfig& config = model_.config().transformer;
    const int64_t original = config.rope_original_max_position_embeddings;
    return config.rope_scaling_type == RopeScaling::kLongRope && s.done > 0 && s.done <= original &&
           static_cast<int64_t>(s.ids.size()) > original;
  }

  void reserve(Sequence& s, int64_t positions) {
    while (static_cast<int64_t>(s.blocks.size()) * kBlockSize < positions) {
      if (free_.empty()) grow();
      s.blocks.push_back(free_.back());
      free_.pop_back();
    }
  }
  void grow() {
    const int64_t more = std::max<int64_t>(num_blocks_, static_cast<int64_t>(sequences_.size()));
    for (int64_t block = num_blocks_ + more; block-- > num_blocks_;)
      free_.push_back(static_cast<int32_t>(block));
    num_blocks_ += more;
  }

  Model& model_;
  at::Device device_;
  DecodingState state_;
  std::vector<Sequence> sequences_;
  std::vector<int32_t> free_;
  int64_t num_blocks_ = 0;
};

// The next token of each sequence; sequence i is choice i of the seed.
class TokenDraws {
 public:
  TokenDraws(Model& model, const std::vector<GeneratedRow>& rows, const SamplingConfig& sampling)
      : sampler_(model.config().vocab_size,
                 model.config().padded_vocab_size / model.groups().tp.size(), model.groups().tp,
                 device_of(model)) {
    for (size_t i = 0; i < rows.size(); ++i) {
      SlotStart start;
      start.slot = start.choice = static_cast<int32_t>(i);
      start.ids = rows[i].result.prompt_tokens;
      start.prompt_length = static_cast<int64_t>(start.ids.size());
      start.sampling = sampling.parameters();
      sampler_.start(start);
      positions_.push_back(start.prompt_length);
    }
  }

  std::vector<DrawnToken> of(const at::Tensor& logits, const std::vector<size_t>& sequences) {
    std::vector<TokenSampler::Row> rows;
    std::vector<int32_t> slots;
    for (const size_t i : sequences) {
      slots.push_back(static_cast<int32_t>(i));
      rows.push_back({slots.back(), positions_[i]++});
    }
    const DrawReport report(slots, {});
    const at::Tensor numbers = sampler_.draw(logits, rows, report).report.to(at::kCPU);
    std::vector<DrawnToken> drawn = report.read(numbers.const_data_ptr<double>());
    for (size_t j = 0; j < drawn.size(); ++j)
      MEGATRON_CHECK(drawn[j].finite, "the model's logits are not finite at position ",
                     rows[j].position, "\nhint: the checkpoint may come from a run that diverged");
    return drawn;
  }

 private:
  TokenSampler sampler_;
  std::vector<int64_t> positions_;  // of the next token, by sequence
};

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
  std::vector<GeneratedRow> rows = start_rows(config, tokenizer, prompts, options);
  if (options.tokens_to_generate > 0) {
    Decoder decoder(model, rows.size());
    TokenDraws draws(model, rows, options.sampling);
    for (size_t i = 0; i < rows.size(); ++i) decoder.push(i, rows[i].result.prompt_tokens);
    for (size_t unfinished = rows.size(); unfinished > 0;) {
      const Decoder::Step decoded = decoder.step();
      for (const DrawnToken& drawn : draws.of(decoded.logits, decoded.sequences)) {
        const auto i = static_cast<size_t>(drawn.slot);
        const std::string piece = rows[i].push(drawn.id);
        if (stream && !piece.empty()) stream(i, piece);
        if (rows[i].finished()) {
          decoder.finish(i);
          --unfinished;
        } else {
          decoder.push(i, {&drawn.id, 1});
        }
      }
    }
  }
  std::vector<Generation> results;
  results.reserve(rows.size());
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
