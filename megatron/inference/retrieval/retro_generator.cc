#include "megatron/inference/retrieval/retro_generator.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/models/retro/retro_config.h"
#include "megatron/scheduling/text_output.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/attention/chunked_cross_attention.h"
#include "megatron/transformer/layer/forward_context.h"
#include "megatron/transformer/layer/layer_state.h"

namespace megatron {
namespace {

constexpr size_t kTexts = 64;  // at a time
constexpr int64_t kBlockSize = 64;

at::Tensor longs(const std::vector<int64_t>& values, at::Device device) {
  return at::tensor(values, at::kLong).to(device);
}

// How a text is cut, and where a position lies.
struct Cut {
  Cut(int64_t aligned, int64_t length) : m(length), first((aligned - 1) % length + 1) {}
  int64_t chunk_of(int64_t position) const {
    return position < first ? 0 : 1 + (position - first) / m;
  }
  int64_t begin(int64_t chunk) const { return chunk == 0 ? 0 : first + (chunk - 1) * m; }
  int64_t end(int64_t chunk) const { return first + chunk * m; }
  // The chunk that a position reads; -1: none.
  int64_t read_by(int64_t position) const {
    return position < first - 1 ? -1 : (position - first + 1) / m;
  }
  int64_t m, first;
};

struct Text {
  Text(Generation& generation, size_t index, int64_t m)
      : result(generation),
        number(static_cast<int64_t>(index)),
        ids(generation.prompt_tokens),
        cut(std::ssize(ids), m) {}
  Generation& result;
  int64_t number;            // of the prompt
  std::vector<int32_t> ids;  // all that are known
  Cut cut;
  int64_t computed = 0;              // positions that the states hold
  std::vector<int32_t> blocks = {};  // of the cache
  std::vector<uint8_t> there = {};   // which neighbours of the last whole chunk are
  std::unique_ptr<TextOutput> output = {};
  bool ended = false;
  int64_t count() const { return std::ssize(ids) - computed; }  // positions to compute
};

// The rows of one pass, [first, first + count) of some texts, and what they read.
class PassOfChunks {
 public:
  PassOfChunks(std::vector<Text>& texts, const std::vector<size_t>& running,
               const FindNeighbors& find, int64_t m, int64_t neighbors, int64_t fill)
      : texts_(texts), m_(m), k_(neighbors), slots_(std::ssize(texts)) {
    std::vector<WholeChunk> asked;
    for (const size_t slot : running) complete_chunks(slot, asked);
    std::vector<NeighborIds> found;
    if (!asked.empty()) found = find(asked);
    MEGATRON_CHECK(found.size() == asked.size(), "neighbours of ", found.size(), " chunks for ",
                   asked.size());
    columns_ = neighbor_columns(found, neighbors, m, fill);
    for (const size_t slot : running) t_ += texts[slot].count();
    for (const size_t slot : running) add_rows(slot);
  }

  std::shared_ptr<const DecodedChunks> chunks(at::Device device) const;

 private:
  struct Group {
    int64_t source;
    std::vector<int64_t> rows;
    std::vector<uint8_t> there;
  };

  // Chunks of which this pass computes the last position.
  void complete_chunks(size_t slot, std::vector<WholeChunk>& asked) {
    const Text& text = texts_[slot];
    for (int64_t u = text.cut.chunk_of(text.computed); text.cut.end(u) <= std::ssize(text.ids);
         ++u) {
      new_[{slot, u}] = std::ssize(asked);
      asked.push_back({text.number,
                       u,
                       {text.ids.begin() + text.cut.begin(u), text.ids.begin() + text.cut.end(u)}});
    }
  }

  void add_rows(size_t slot) {
    Text& text = texts_[slot];
    const Cut& cut = text.cut;
    const int64_t own = static_cast<int64_t>(slot), row = rows_;
    const auto row_of = [&](int64_t position) {
      return position >= text.computed ? slots_ * m_ + row + position - text.computed
                                       : own * m_ + position - cut.begin(cut.chunk_of(position));
    };
    int64_t last = -1;
    for (int64_t u = cut.chunk_of(text.computed); cut.end(u) <= std::ssize(text.ids); ++u) {
      std::vector<int64_t> rows(static_cast<size_t>(m_), slots_ * m_ + t_);  // zeros
      for (int64_t p = cut.begin(u); p < cut.end(u); ++p)
        rows[static_cast<size_t>(p - cut.begin(u))] = row_of(p);
      chunk_rows_.push_back(std::move(rows));
      last = u;
    }
    for (int64_t p = text.computed; p < std::ssize(text.ids); ++p) {
      const int64_t u = cut.chunk_of(p);
      if (cut.end(u) > std::ssize(text.ids)) {
        kept_rows_.push_back(row + p - text.computed);
        kept_places_.push_back(own * m_ + p - cut.begin(u));
      }
      add_reader(slot, p, row + p - text.computed);
    }
    if (last >= 0) {
      last_chunks_.push_back(new_.at({slot, last}));
      last_slots_.push_back(own);
      text.there = there_of(new_.at({slot, last}));
    }
    rows_ += text.count();
  }

  void add_reader(size_t slot, int64_t position, int64_t row) {
    const Text& text = texts_[slot];
    const int64_t u = text.cut.read_by(position);
    if (u < 0) return;
    const auto found = new_.find({slot, u});
    const std::vector<uint8_t> there = found == new_.end() ? text.there : there_of(found->second);
    if (std::ranges::find(there, 1) == there.end()) return;
    Group& group = groups_[{slot, u}];
    group.source = found == new_.end() ? static_cast<int64_t>(slot) : slots_ + found->second;
    group.there = there;
    group.rows.push_back(row);
  }

  std::vector<uint8_t> there_of(int64_t chunk) const {
    const uint8_t* data = columns_.there.const_data_ptr<uint8_t>() + chunk * k_;
    return {data, data + k_};
  }

  std::vector<Text>& texts_;
  const int64_t m_, k_, slots_;
  int64_t t_ = 0, rows_ = 0;                           // of the batch; of those that were added
  std::map<std::pair<size_t, int64_t>, int64_t> new_;  // chunks of texts
  NeighborColumns columns_;
  std::vector<std::vector<int64_t>> chunk_rows_;  // of each new chunk
  std::vector<int64_t> kept_rows_, kept_places_, last_chunks_, last_slots_;
  std::map<std::pair<size_t, int64_t>, Group> groups_;
};

std::shared_ptr<const DecodedChunks> PassOfChunks::chunks(at::Device device) const {
  auto out = std::make_shared<DecodedChunks>();
  out->length = m_;
  out->tokens = columns_.tokens.to(device);
  std::vector<int64_t> rows;
  for (const std::vector<int64_t>& chunk : chunk_rows_)
    rows.insert(rows.end(), chunk.begin(), chunk.end());
  out->chunk_rows = longs(rows, device).view({std::ssize(chunk_rows_), m_}).t().contiguous();
  out->kept_rows = longs(kept_rows_, device);
  out->kept_places = longs(kept_places_, device);
  out->last_chunks = longs(last_chunks_, device);
  out->last_slots = longs(last_slots_, device);
  int64_t most = 0;
  for (const auto& [chunk, group] : groups_) most = std::max(most, std::ssize(group.rows));
  const int64_t groups = std::ssize(groups_);
  std::vector<int64_t> sources, places(static_cast<size_t>(t_), most * groups),
      queries(static_cast<size_t>(most * groups), t_);
  std::vector<at::Tensor> there;
  for (const auto& [chunk, group] : groups_) {
    const int64_t g = std::ssize(sources);
    for (size_t i = 0; i < group.rows.size(); ++i) {
      const int64_t place = static_cast<int64_t>(i) * groups + g;
      queries[static_cast<size_t>(place)] = group.rows[i];
      places[static_cast<size_t>(group.rows[i])] = place;
    }
    sources.push_back(group.source);
    there.push_back(at::tensor(std::vector<int64_t>(group.there.begin(), group.there.end())));
  }
  const int64_t r = 2 * m_;
  out->sources = longs(sources, device);
  out->queries = longs(queries, device).view({most, groups});
  out->places = longs(places, device);
  const at::Tensor all = there.empty() ? at::zeros({0, k_}, at::kLong) : at::stack(there);
  out->mask =
      (all == 0).unsqueeze(1).expand({groups, r, k_}).reshape({groups, 1, 1, r * k_}).to(device);
  return out;
}

class RetroGenerator {
 public:
  RetroGenerator(Model& model, const Tokenizer& tokenizer, const GenerateOptions& options,
                 const FindNeighbors& find, const StreamCallback& stream)
      : model_(model),
        tokenizer_(tokenizer),
        options_(options),
        find_(find),
        stream_(stream),
        own_(model.config().own.as_or_default<RetroConfig>()),
        device_(model.parameters().front()->value.device()),
        conditions_(conditions(options)) {}

  // Texts [first, first + count) of all.
  void run(std::vector<Generation>& all, size_t first, size_t count) {
    texts_.clear();
    state_.clear();
    sampler_.emplace(model_.config().vocab_size, model_.config().padded_vocab_size,
                     model_.groups().tp, device_);
    for (size_t i = first; i < first + count; ++i)
      texts_.emplace_back(all[i], i, own_.retro_chunk_length);
    for (size_t slot = 0; slot < texts_.size(); ++slot) start(slot);
    for (;;) {
      std::vector<size_t> running;
      for (size_t slot = 0; slot < texts_.size(); ++slot)
        if (!texts_[slot].ended) running.push_back(slot);
      if (running.empty()) return;
      take(running, forward(running));
    }
  }

 private:
  StopConditions conditions(const GenerateOptions& options) const {
    StopConditions stop;
    stop.max_tokens = options.tokens_to_generate;
    stop.end_tokens = options.stop_tokens;
    if (options.stop_at_eod && tokenizer_.eod()) stop.end_tokens.push_back(*tokenizer_.eod());
    stop.stop_texts = options.stop;
    stop.skip_special_tokens = options.skip_special_tokens;
    return stop;
  }

  void start(size_t slot) {
    Text& text = texts_[slot];
    const int64_t most = std::ssize(text.ids) + options_.tokens_to_generate;
    for (int64_t i = 0; i * kBlockSize < most; ++i) text.blocks.push_back(num_blocks_++);
    SlotStart begin;
    begin.slot = static_cast<int32_t>(slot);
    begin.choice = static_cast<int32_t>(text.number);
    begin.prompt_length = std::ssize(text.ids);
    begin.ids = text.ids;
    begin.sampling = options_.sampling.parameters();
    begin.ends = conditions_.end_tokens;
    sampler_->start(begin);
    const auto stops = conditions_.stop_texts.empty()
                           ? nullptr
                           : std::make_shared<const StopAutomaton>(conditions_.stop_texts);
    text.output = std::make_unique<TextOutput>(tokenizer_, conditions_, stops);
  }

  // Logits of the last row of each text.
  at::Tensor forward(const std::vector<size_t>& running) {
    std::vector<int64_t> ids, last, slots;
    std::vector<RaggedPart> parts;
    // Parts of one token come first: either all have one, or the first pass reads the prompts.
    std::vector<size_t> order = running;
    std::ranges::stable_partition(order, [&](size_t slot) { return texts_[slot].count() == 1; });
    const PassOfChunks pass(texts_, order, find_, own_.retro_chunk_length, own_.retro_num_neighbors,
                            tokenizer_.eod().value_or(0));
    std::map<size_t, int64_t> last_of;
    for (const size_t slot : order) {
      Text& text = texts_[slot];
      ids.insert(ids.end(), text.ids.begin() + text.computed, text.ids.end());
      const int64_t count = text.count(), end = text.computed + count;
      parts.push_back({text.computed,
                       count,
                       {text.blocks.begin(), text.blocks.begin() + (end - 1) / kBlockSize + 1}});
      slots.push_back(static_cast<int64_t>(slot));
      last_of[slot] = std::ssize(ids) - 1;
      text.computed = end;
    }
    for (const size_t slot : running) last.push_back(last_of[slot]);
    const RaggedBatch batch{PagedRows(std::move(parts), num_blocks_, kBlockSize, device_),
                            std::move(slots), std::ssize(texts_)};
    const DecodingPass decoding{state_, batch};
    ForwardContext context;
    context.decoding = &decoding;
    context.place = {at::zeros({1}, at::dtype(at::kLong).device(device_)), batch.rows.positions};
    context.position_ids = batch.rows.positions.unsqueeze(0);
    context.retrieved = std::make_shared<const RetrievedChunks>(pass.chunks(device_), at::Tensor());
    Batch inputs;
    inputs.set("tokens", longs(ids, device_).unsqueeze(0));
    inputs.place = context.place;
    const at::Tensor hidden = model_.hidden(inputs, {}, context).front();  // [t, 1, h]
    return model_.logits(hidden.index_select(0, longs(last, device_))).squeeze(1);
  }

  void take(const std::vector<size_t>& running, const at::Tensor& logits) {
    std::vector<TokenSampler::Row> rows;
    for (const size_t slot : running) {
      const Text& text = texts_[slot];
      const bool finite = logits.select(0, std::ssize(rows))
                              .narrow(0, 0, model_.config().vocab_size)
                              .isfinite()
                              .all()
                              .item<bool>();
      MEGATRON_CHECK(finite, "the model's logits are not finite at position ", text.ids.size(),
                     "\nhint: the checkpoint may come from a run that diverged");
      rows.push_back({static_cast<int32_t>(slot), std::ssize(text.ids)});
    }
    const at::Tensor drawn = sampler_->draw(logits, rows, {}).ids.to(at::kCPU);
    for (size_t i = 0; i < running.size(); ++i)
      add(texts_[running[i]], static_cast<int32_t>(drawn[static_cast<int64_t>(i)].item<int64_t>()));
  }

  void add(Text& text, int32_t id) {
    Generation& result = text.result;
    const bool end = std::ranges::find(conditions_.end_tokens, id) != conditions_.end_tokens.end();
    std::string piece;
    text.ended = true;
    if (end) {
      result.finish_reason = FinishReason::kEndToken;
    } else {
      text.ids.push_back(id);
      result.tokens.push_back(id);
      piece = text.output->push(id);
      text.ended =
          text.output->match() >= 0 || std::ssize(result.tokens) == options_.tokens_to_generate;
    }
    if (text.ended && text.output->match() < 0) piece += text.output->finish();
    if (text.output->match() >= 0) result.finish_reason = FinishReason::kStopText;
    result.text += piece;
    if (stream_ && !piece.empty()) stream_(static_cast<size_t>(text.number), piece);
  }

  Model& model_;
  const Tokenizer& tokenizer_;
  const GenerateOptions& options_;
  const FindNeighbors& find_;
  const StreamCallback& stream_;
  const RetroConfig own_;
  const at::Device device_;
  const StopConditions conditions_;
  DecodingState state_;
  std::optional<TokenSampler> sampler_;
  std::vector<Text> texts_;
  int32_t num_blocks_ = 0;
};

}  // namespace

NeighborColumns neighbor_columns(const std::vector<NeighborIds>& found, int64_t neighbors,
                                 int64_t chunk_length, int64_t fill) {
  const int64_t chunks = std::ssize(found), r = 2 * chunk_length;
  NeighborColumns out{at::full({chunks, neighbors, r}, fill, at::kLong),
                      at::zeros({chunks, neighbors}, at::kByte)};
  int64_t* tokens = out.tokens.mutable_data_ptr<int64_t>();
  uint8_t* there = out.there.mutable_data_ptr<uint8_t>();
  for (int64_t u = 0; u < chunks; ++u) {
    const NeighborIds& all = found[static_cast<size_t>(u)];
    for (int64_t i = 0; i < std::min<int64_t>(std::ssize(all), neighbors); ++i) {
      const std::vector<int32_t>& ids = all[static_cast<size_t>(i)];
      const int64_t row = u * neighbors + i;
      std::copy_n(ids.begin(), std::min<int64_t>(std::ssize(ids), r), tokens + row * r);
      there[row] = 1;
    }
  }
  return out;
}

std::vector<WholeChunk> chunks_of_text(std::span<const int32_t> ids, int64_t text,
                                       int64_t chunk_length, int64_t aligned) {
  const Cut cut(aligned, chunk_length);
  std::vector<WholeChunk> chunks;
  for (int64_t u = 0; cut.end(u) <= std::ssize(ids); ++u)
    chunks.push_back({text, u, {ids.begin() + cut.begin(u), ids.begin() + cut.end(u)}});
  return chunks;
}

std::vector<Generation> generate_with_neighbors(Model& model, const Tokenizer& tokenizer,
                                                std::span<const std::string> prompts,
                                                const GenerateOptions& options,
                                                const FindNeighbors& find,
                                                const StreamCallback& stream) {
  const at::NoGradGuard no_grad;
  MEGATRON_ASSERT(model.config().type == "retro" && model.groups().tp.size() == 1,
                  "a whole model with retrieval generates");
  std::vector<Generation> texts = encode_prompts(model.config(), tokenizer, prompts, options);
  if (options.tokens_to_generate <= 0) return texts;
  for (size_t first = 0; first < texts.size(); first += kTexts)
    RetroGenerator(model, tokenizer, options, find, stream)
        .run(texts, first, std::min(kTexts, texts.size() - first));
  return texts;
}

at::Tensor full_logits_with_neighbors(Model& model, std::span<const int32_t> ids,
                                      const NeighborColumns& found) {
  const at::NoGradGuard no_grad;
  const at::Device device = model.parameters().front()->value.device();
  const at::Tensor tokens =
      longs(std::vector<int64_t>(ids.begin(), ids.end()), device).unsqueeze(0);
  ForwardContext context;
  context.place = {at::zeros({1}, tokens.options()), at::arange(tokens.size(1), tokens.options())};
  Batch batch;
  batch.set("tokens", tokens);
  batch.set("neighbor_tokens", found.tokens.to(device).unsqueeze(0));
  batch.set("neighbor_mask", found.there.to(device).unsqueeze(0));
  batch.place = context.place;
  const at::Tensor logits = model.logits(model.hidden(batch, {}, context).front())
                                .select(1, 0)
                                .narrow(-1, 0, model.config().vocab_size);
  return logits.to(at::kCPU)
      .to(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
      .contiguous();
}

}  // namespace megatron
