#include "megatron/pipeline_parallel/stage_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "megatron/base/check.h"

namespace megatron {
namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& hint) {
  throw UsageError(what + "\nhint: " + hint);
}

// "24 or 32": the positive multiples of `unit` next to `value`.
std::string around(int64_t value, int64_t unit, int64_t less = 0) {
  const int64_t below = value / unit * unit - less, above = (value / unit + 1) * unit - less;
  return below > 0 ? cat(below, " or ", above) : cat(above);
}

// -- the layout string

// Expands repetitions: "(tt|)*2L" -> "tt|tt|L". Keeps each character's position in the text, for
// messages.
class LayoutExpander {
 public:
  struct Mark {
    char letter;
    size_t position;  // in the text
  };

  explicit LayoutExpander(std::string_view text) : text_(text) {}

  std::vector<Mark> expand() {
    std::vector<Mark> marks = sequence();
    if (at_ < text_.size()) fail(at_, "has no ( before it");
    return marks;
  }

 private:
  static constexpr size_t kLongest = 1 << 20;

  // Up to the end or a closing parenthesis.
  std::vector<Mark> sequence() {
    std::vector<Mark> marks;
    while (at_ < text_.size() && text_[at_] != ')') {
      const char c = text_[at_];
      if (c == ',') {
        ++at_;
      } else if (c == '(') {
        const size_t open = at_++;
        const std::vector<Mark> inner = sequence();
        if (at_ == text_.size()) fail(open, "is not closed");
        ++at_;
        if (at_ == text_.size() || text_[at_] != '*')
          fail(open, "opens a group without a count", "write (...)*n");
        append(marks, inner, count());
      } else {
        const Mark mark{c, at_++};
        check(mark);
        append(marks, {mark}, at_ < text_.size() && text_[at_] == '*' ? count() : 1);
      }
    }
    return marks;
  }

  void check(const Mark& mark) const {
    if (std::string_view("VEetmL|").find(mark.letter) == std::string_view::npos)
      fail(mark.position,
           "is none of E (embedding), e (encoder layer), t (layer), m (multi-token prediction), L "
           "(loss), V (encoder of images or sounds), | (next stage), x*n and (...)*n");
  }

  // The number after the '*' at position at_.
  size_t count() {
    const size_t star = at_++;
    size_t n = 0;
    const size_t first = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && n <= kLongest)
      n = 10 * n + static_cast<size_t>(text_[at_++] - '0');
    if (at_ == first || n == 0 || n > kLongest)
      fail(star, "needs a count from 1 on", "write x*n or (...)*n");
    return n;
  }

  void append(std::vector<Mark>& marks, const std::vector<Mark>& inner, size_t times) {
    if (marks.size() + inner.size() * times > kLongest)
      fail(at_ - 1, "repeats more than any model has layers");
    for (size_t i = 0; i < times; ++i) marks.insert(marks.end(), inner.begin(), inner.end());
  }

  [[noreturn]] void fail(size_t position, const std::string& what,
                         const std::string& hint = "for example \"Et*3|(tt|)*29t|L\"") const {
    refuse(cat("--pipeline-model-parallel-layout \"", text_, "\": '", text_[position],
               "' at position ", position + 1, " ", what),
           hint);
  }

  std::string_view text_;
  size_t at_ = 0;
};

// -- division by numbers

struct Question {
  const PipelineConfig& config;
  int64_t stages;
  int64_t num_layers;
  bool embedding() const { return config.account_for_embedding_in_pipeline_split; }
  bool loss() const { return config.account_for_loss_in_pipeline_split; }
  int64_t encoder() const { return config.account_for_encoder_in_pipeline_split; }
  int64_t extra() const { return encoder() + embedding() + loss(); }
  // "--num-layers 30 (32 with embedding and loss)".
  std::string layers() const {
    if (extra() == 0) return cat("--num-layers ", num_layers);
    std::string with;
    for (const auto& [counts, what] :
         {std::pair(encoder() > 0, "encoder"), std::pair(embedding(), "embedding"),
          std::pair(loss(), "loss")})
      if (counts) with += cat(with.empty() ? "" : " and ", what);
    return cat("--num-layers ", num_layers, " (", num_layers + extra(), " with ", with, ")");
  }
};

int64_t number_of_chunks(const Question& q) {
  const bool v_shaped = schedule_placement(q.config.pipeline_schedule) == ChunkPlacement::kVShaped;
  int64_t chunks = q.config.num_virtual_stages_per_pipeline_rank.value_or(v_shaped ? 2 : 1);
  if (const auto& layers = q.config.num_layers_per_virtual_pipeline_stage) {
    const int64_t total = q.num_layers + q.extra(), unit = q.stages * *layers;
    if (total % unit != 0)
      refuse(cat(q.layers(), " is not divisible by --pipeline-model-parallel-size ", q.stages,
                 " x --num-layers-per-virtual-pipeline-stage ", *layers, " = ", unit),
             cat("the nearest --num-layers: ", around(total, unit, q.extra())));
    chunks = total / unit;
  }
  if (v_shaped && chunks != 2)
    refuse(cat("--pipeline-schedule ",
               schedule_names()[static_cast<size_t>(q.config.pipeline_schedule)],
               " takes 2 virtual stages per pipeline rank, the flags ask for ", chunks),
           "--num-virtual-stages-per-pipeline-rank 2");
  return chunks;
}

// Layers of each segment when all segments have equal weight.
std::vector<int64_t> even_counts(const Question& q, int64_t chunks) {
  const int64_t total = q.num_layers + q.extra(), segments = q.stages * chunks;
  if (total % segments != 0) {
    const std::string by = chunks == 1 ? cat("--pipeline-model-parallel-size ", q.stages)
                                       : cat("--pipeline-model-parallel-size ", q.stages, " x ",
                                             chunks, " virtual stages = ", segments);
    refuse(cat(q.layers(), " is not divisible by ", by),
           cat("the nearest --num-layers: ", around(total, segments, q.extra()),
               "; uneven stages: --pipeline-model-parallel-layout, "
               "--decoder-first-pipeline-num-layers, "
               "--decoder-last-pipeline-num-layers, --account-for-embedding-in-pipeline-split, "
               "--account-for-loss-in-pipeline-split"));
  }
  std::vector<int64_t> counts(static_cast<size_t>(segments), total / segments);
  counts.front() -= q.embedding() + q.encoder();
  if (counts.front() < 0)
    refuse(cat("--account-for-encoder-in-pipeline-split ", q.encoder(), ": ",
               chunks == 1 ? "a stage" : "a virtual stage", " has room for ", total / segments,
               q.embedding() ? " layers, the embedding among them" : " layers"),
           "give encoders stages of their own: V in --pipeline-model-parallel-layout");
  counts.back() -= q.loss();
  return counts;
}

// Layers of each segment when the first or the last stage has its own number of layers.
std::vector<int64_t> counts_with_ends(const Question& q, int64_t chunks) {
  const auto &first = q.config.decoder_first_pipeline_num_layers,
             &last = q.config.decoder_last_pipeline_num_layers;
  const std::string flags = (first ? cat(" --decoder-first-pipeline-num-layers ", *first) : "") +
                            (last ? cat(" --decoder-last-pipeline-num-layers ", *last) : "");
  const int64_t between = q.stages - first.has_value() - last.has_value();
  const int64_t rest = q.num_layers - first.value_or(0) - last.value_or(0);
  if (between == 0 && rest != 0)
    refuse(cat("--num-layers ", q.num_layers, " is not the sum of", flags),
           cat("--decoder-last-pipeline-num-layers ", std::max<int64_t>(q.num_layers - *first, 0)));
  if (between > 0 && rest < between * chunks)
    refuse(cat("of --num-layers ", q.num_layers, flags, " leave ", rest, " for ", between * chunks,
               " further ", chunks == 1 ? "stages" : "virtual stages"),
           cat("leave at least ", between * chunks));
  if (between > 0 && rest % (between * chunks) != 0)
    refuse(cat("of --num-layers ", q.num_layers, flags, " leave ", rest,
               ", which is not divisible by ", between, " further stages",
               chunks == 1 ? "" : cat(" x ", chunks, " virtual stages")),
           cat("leave ", around(rest, between * chunks)));
  std::vector<int64_t> of_stage(static_cast<size_t>(q.stages), between > 0 ? rest / between : 0);
  if (first) of_stage.front() = *first;
  if (last) of_stage.back() = *last;
  for (const auto& count : {first, last})
    if (count && *count % chunks != 0)
      refuse(cat("a stage of ", *count, " layers (", flags.substr(1), ") is not divisible into ",
                 chunks, " virtual stages"),
             cat("the nearest counts: ", around(*count, chunks)));
  std::vector<int64_t> counts;
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int64_t layers : of_stage) counts.push_back(layers / chunks);
  return counts;
}

std::string with_bars(std::string_view letters, const std::vector<int64_t>& segments) {
  std::string text;
  int64_t next = 0;
  for (size_t i = 0; i < segments.size(); next += segments[i++])
    text += cat(i > 0 ? "|" : "",
                letters.substr(static_cast<size_t>(next), static_cast<size_t>(segments[i])));
  return text;
}

// The nearest pattern with fewer segments: where two neighbours have the fewest letters, they are
// joined.
std::string joined_segments(std::string_view letters, std::vector<int64_t> segments, size_t count) {
  while (segments.size() > count) {
    size_t at = 0;
    for (size_t i = 0; i + 1 < segments.size(); ++i)
      if (segments[i] + segments[i + 1] < segments[at] + segments[at + 1]) at = i;
    segments[at] += segments[at + 1];
    segments.erase(segments.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  return with_bars(letters, segments);
}

// The nearest with more: the longest are halved.
std::string halved_segments(std::string_view letters, std::vector<int64_t> segments, size_t count) {
  while (segments.size() < count) {
    const auto longest = std::ranges::max_element(segments);
    const int64_t half = *longest / 2;
    *longest -= half;
    segments.insert(longest + 1, half);
  }
  return with_bars(letters, segments);
}

// The patterns next to that of `q` whose segments are a multiple of `unit`, and no more than
// `most`.
std::string nearest_patterns(const Question& q, int64_t unit, int64_t most) {
  const std::vector<int64_t>& segments = q.config.hybrid_segments;
  const int64_t fewer = std::min(std::ssize(segments) / unit * unit, most),
                more = std::ssize(segments) < most ? fewer + unit : 0;
  std::string text;
  const auto add = [&](const std::string& pattern) {
    text += cat(text.empty() ? "" : " or ", "\"", pattern, "\"");
  };
  const auto size = [](int64_t count) { return static_cast<size_t>(count); };
  if (fewer > 0) add(joined_segments(q.config.hybrid_letters, segments, size(fewer)));
  if (more > 0) add(halved_segments(q.config.hybrid_letters, segments, size(more)));
  return text;
}

// Layers of the segments of a pattern with `|`.
const std::vector<int64_t>& counts_of_pattern(const Question& q) {
  const auto count = std::ssize(q.config.hybrid_segments);
  const bool v_shaped = schedule_placement(q.config.pipeline_schedule) == ChunkPlacement::kVShaped;
  const std::string pattern = cat("--hybrid-layer-pattern has ", count, " segments");
  if (v_shaped ? count != 2 * q.stages : count % q.stages != 0)
    refuse(cat(pattern, v_shaped ? ", the schedule takes 2 x" : ", which is not divisible by",
               " --pipeline-model-parallel-size ", q.stages),
           cat(v_shaped ? nearest_patterns(q, 2 * q.stages, 2 * q.stages)
                        : nearest_patterns(q, q.stages, count + q.stages),
               "; or without |: layers are then divided by cost"));
  const auto& chunks = q.config.num_virtual_stages_per_pipeline_rank;
  if (chunks && *chunks * q.stages != count)
    refuse(cat(pattern, ", --num-virtual-stages-per-pipeline-rank ", *chunks,
               " x --pipeline-model-parallel-size ", q.stages, " asks for ", *chunks * q.stages),
           q.config.stored_in.empty()
               ? cat("leave --num-virtual-stages-per-pipeline-rank out: it is ", count / q.stages)
               : cat("the virtual stages are those of ", q.config.stored_in,
                     ": leave --use-mp-args-from-checkpoint-args out, or give ",
                     nearest_patterns(q, *chunks * q.stages, *chunks * q.stages)));
  return q.config.hybrid_segments;
}

// Layers of each segment of a pattern without `|`, before they are divided by cost.
std::vector<int64_t> counts_of_letters(const Question& q, int64_t chunks) {
  const int64_t segments = q.stages * chunks;
  if (q.num_layers < segments)
    refuse(cat("--hybrid-layer-pattern has ", q.num_layers, " layers for ", segments,
               " segments of the pipeline"),
           "fewer stages or virtual stages, or | around segments without layers");
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < segments; ++i)
    counts.push_back((i + 1) * q.num_layers / segments - i * q.num_layers / segments);
  return counts;
}

std::vector<StageSlice> to_slices(const std::vector<int64_t>& counts) {
  std::vector<StageSlice> slices;
  int64_t next = 0;
  for (int64_t count : counts) {
    slices.push_back({next, count, false, false});
    next += count;
  }
  slices.front().embedding = true;
  slices.back().head = true;
  return slices;
}

}  // namespace

StageLayout::StageLayout(std::vector<StageSlice> segments, int num_stages, ChunkPlacement placement)
    : segments_(std::move(segments)), num_stages_(num_stages), placement_(placement) {
  MEGATRON_ASSERT(num_stages >= 1 && !segments_.empty() &&
                      segments_.size() % static_cast<size_t>(num_stages) == 0,
                  segments_.size(), " segments on ", num_stages, " stages");
  int64_t next = 0;
  for (const StageSlice& segment : segments_) {
    MEGATRON_ASSERT(segment.first_layer == next, "a segment starts at layer ", segment.first_layer,
                    ", expected ", next);
    next += segment.num_layers;
  }
}

int64_t StageLayout::num_layers() const {
  return segments_.back().first_layer + segments_.back().num_layers;
}

std::vector<int64_t> StageLayout::layer_counts() const {
  std::vector<int64_t> counts;
  for (const StageSlice& segment : segments_) counts.push_back(segment.num_layers);
  return counts;
}

void StageLayout::set_costs(std::vector<PassCosts> costs) {
  MEGATRON_ASSERT(costs.size() == segments_.size(), costs.size(), " costs of ", segments_.size(),
                  " segments");
  costs_ = std::move(costs);
}

StageSlice StageLayout::slice(int stage, int chunk) const {
  StageSlice slice =
      segments_.at(static_cast<size_t>(segment_of(placement_, num_stages_, {stage, chunk})));
  if (num_stages_ == 1) return slice;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const int at = place_of(placement_, num_stages_, static_cast<int>(i)).stage;
    if (segments_[i].embedding) slice.stages.push_back(at);
    slice.stages.insert(slice.stages.end(), static_cast<size_t>(segments_[i].num_layers), at);
    if (segments_[i].head) slice.stages.push_back(at);
  }
  return slice;
}

StageLayout make_stage_layout(const PipelineConfig& config, int64_t pipeline_model_parallel_size,
                              int64_t num_layers) {
  const Question q{config, pipeline_model_parallel_size, num_layers};
  const ChunkPlacement placement = schedule_placement(config.pipeline_schedule);
  if (q.stages == 1) return StageLayout(num_layers);
  std::vector<StageSlice> segments;
  if (!config.hybrid_segments.empty())
    return {to_slices(counts_of_pattern(q)), static_cast<int>(q.stages), placement};
  if (!config.pipeline_model_parallel_layout.empty()) {
    segments = parse_layout(config.pipeline_model_parallel_layout, num_layers);
    const auto count = static_cast<int64_t>(segments.size());
    const bool v_shaped = placement == ChunkPlacement::kVShaped;
    if (v_shaped ? count != 2 * q.stages : count % q.stages != 0)
      refuse(cat("--pipeline-model-parallel-layout has ", count, " segments, ",
                 v_shaped ? "the schedule takes 2 x" : "which is not divisible by",
                 " --pipeline-model-parallel-size ", q.stages),
             v_shaped ? cat(2 * q.stages, " segments") : cat(around(count, q.stages), " segments"));
  } else {
    const int64_t chunks = number_of_chunks(q);
    const bool ends =
        config.decoder_first_pipeline_num_layers || config.decoder_last_pipeline_num_layers;
    segments = to_slices(ends            ? counts_with_ends(q, chunks)
                         : config.hybrid ? counts_of_letters(q, chunks)
                                         : even_counts(q, chunks));
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    const StageSlice& s = segments[i];
    if (s.num_layers == 0 && s.num_parts == 0 && !s.embedding && !s.head)
      refuse(cat("segment ", i + 1, " of ", segments.size(), " of the pipeline holds nothing"),
             "give every virtual stage a layer");
  }
  return {std::move(segments), static_cast<int>(q.stages), placement};
}

int64_t count_layout_letters(std::string_view text, char letter) {
  const std::vector<LayoutExpander::Mark> marks = LayoutExpander(text).expand();
  return std::ranges::count(marks, letter, &LayoutExpander::Mark::letter);
}

namespace {

// The marks up to the embedding: V, which stand there only, and the | among them.
size_t letters_of_encoder(const std::vector<LayoutExpander::Mark>& marks, const std::string& name) {
  const auto first = std::ranges::find_if(
      marks, [](const auto& mark) { return mark.letter != 'V' && mark.letter != '|'; });
  const auto behind = std::ranges::find(first, marks.end(), 'V', &LayoutExpander::Mark::letter);
  if (behind != marks.end())
    refuse(cat(name, ": 'V' at position ", behind->position + 1,
               " is behind E: the language model reads what encoders of images and sounds give"),
           "all V before E");
  return marks.empty() || marks.front().letter != 'V' ? 0
                                                      : static_cast<size_t>(first - marks.begin());
}

}  // namespace

std::vector<StageSlice> parse_layout(std::string_view text, int64_t num_layers) {
  const std::string name = cat("--pipeline-model-parallel-layout \"", text, "\"");
  const std::vector<LayoutExpander::Mark> marks = LayoutExpander(text).expand();
  const size_t encoder = letters_of_encoder(marks, name);
  std::vector<int64_t> counts = {0}, parts = {0};
  int64_t embedding = 0;  // its segment
  for (size_t i = 0; i < marks.size(); ++i) {
    const char c = marks[i].letter;
    if (c == 'E' && i > encoder)
      refuse(cat(name, ": 'E' at position ", marks[i].position + 1, " is not at the start"),
             "one E, as the first letter");
    if (c == 'E') embedding = std::ssize(counts) - 1;
    if (c == 'L' && i + 1 < marks.size())
      refuse(cat(name, ": 'L' at position ", marks[i].position + 1, " is not at the end"),
             "one L, as the last letter");
    if (c == 'm' && i + 1 < marks.size() && marks[i + 1].letter != 'm' &&
        marks[i + 1].letter != 'L')
      refuse(cat(name, ": 'm' at position ", marks[i].position + 1,
                 " is not before L: multi-token prediction on another segment than the loss is not "
                 "built"),
             "all m directly before L");
    if (c == '|') {
      counts.push_back(0);
      parts.push_back(0);
    }
    if (c == 'V') ++parts.back();
    if (c == 'e' && std::any_of(marks.begin(), marks.begin() + static_cast<ptrdiff_t>(i),
                                [](const auto& mark) { return mark.letter == 't'; }))
      refuse(cat(name, ": 'e' at position ", marks[i].position + 1,
                 " is after a t: an encoder comes before its decoder"),
             "all e before all t");
    if (c == 't' || c == 'e') ++counts.back();
  }
  if (marks.size() <= encoder || marks[encoder].letter != 'E')
    refuse(cat(name, " does not start with the embedding"), "one E, as the first letter");
  if (marks.back().letter != 'L')
    refuse(cat(name, " does not end with the loss"), "one L, as the last letter");
  const int64_t layers = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  if (layers != num_layers)
    refuse(cat(name, " has ", layers, " layers, --num-layers is ", num_layers),
           layers < num_layers ? cat("add ", num_layers - layers, " t")
                               : cat("take away ", layers - num_layers, " t"));
  std::vector<StageSlice> slices = to_slices(counts);
  slices.front().embedding = false;
  slices[static_cast<size_t>(embedding)].embedding = true;
  const int64_t all = std::accumulate(parts.begin(), parts.end(), int64_t{0});
  int64_t next = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    slices[i].first_part = next;
    slices[i].num_parts = parts[i];
    slices[i].all_parts = all;
    next += parts[i];
  }
  return slices;
}

}  // namespace megatron
