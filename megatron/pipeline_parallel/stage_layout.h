// Which part of the model each chunk of each pipeline stage holds. Without libtorch.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "megatron/pipeline_parallel/pipeline_config.h"
#include "megatron/pipeline_parallel/schedule.h"

namespace megatron {

// One segment: layers [first_layer, first_layer + num_layers), counted from 0, and whether it has
// the embedding and the head.
struct StageSlice {
  int64_t first_layer = 0;
  int64_t num_layers = 0;
  bool embedding = false;  // before the first layer
  bool head = false;       // final norm, output layer and loss, after the last layer
  // Of the whole model: the stages of the embedding, of each layer and of the head; empty: there is
  // one stage. What several segments use has its homes on these.
  std::vector<int> stages = {};
  // Of encoders of media: the letters V of the layout on this segment, counted from 0, and those of
  // the layout. Zeros: encoders are with the embedding
  int64_t first_part = 0, num_parts = 0, all_parts = 0;

  // Whether nothing comes from a segment before it.
  bool starts() const { return all_parts > 0 ? num_parts > 0 && first_part == 0 : embedding; }
  bool encodes_alone() const { return num_parts > 0 && !embedding; }
  // Of the borders before and behind it, as Model::border() counts.
  int64_t layers_before() const {
    return num_parts > 0 || embedding ? before_part(first_part) : first_layer;
  }
  int64_t layers_through() const {
    return encodes_alone() ? before_part(first_part + num_parts) : first_layer + num_layers;
  }
  int64_t before_part(int64_t part) const { return all_parts > 0 ? part - all_parts - 1 : 0; }
  int stage_of_embedding() const { return stages.empty() ? 0 : stages.front(); }
  int stage_of_layer(int64_t layer) const {
    return stages.empty() ? 0 : stages.at(static_cast<size_t>(layer) + 1);
  }
  int stage_of_head() const { return stages.empty() ? 0 : stages.back(); }
  // Of the same part.
  bool operator==(const StageSlice& other) const {
    return first_layer == other.first_layer && num_layers == other.num_layers &&
           embedding == other.embedding && head == other.head && first_part == other.first_part &&
           num_parts == other.num_parts && all_parts == other.all_parts;
  }
};

class StageLayout {
 public:
  // One stage, one chunk: the whole model.
  explicit StageLayout(int64_t num_layers)
      : StageLayout({{0, num_layers, true, true}}, 1, ChunkPlacement::kLooped) {}
  // Segments in model order; their number is a multiple of num_stages.
  StageLayout(std::vector<StageSlice> segments, int num_stages, ChunkPlacement placement);

  int num_stages() const { return num_stages_; }
  int num_chunks() const { return static_cast<int>(segments_.size()) / num_stages_; }
  int64_t num_layers() const;
  const std::vector<StageSlice>& segments() const { return segments_; }
  std::vector<int64_t> layer_counts() const;  // of the segments
  StageSlice slice(int stage, int chunk) const;
  // Times of the segments' passes, where the schedule knows that they differ; empty: they do not.
  const std::vector<PassCosts>& costs() const { return costs_; }
  void set_costs(std::vector<PassCosts> costs);

 private:
  std::vector<StageSlice> segments_;
  int num_stages_;
  ChunkPlacement placement_;
  std::vector<PassCosts> costs_;
};

// The layout that the configuration asks for; it always covers num_layers layers. Throws UsageError
// that names the nearest legal values if the layers cannot be divided as requested.
StageLayout make_stage_layout(const PipelineConfig& config, int64_t pipeline_model_parallel_size,
                              int64_t num_layers);

// Parses a layout string into segments: V encoder of media or a layer of it, E embedding, e encoder
// layer, t decoder layer, m layer of multi-token prediction, L loss; `|` separates segments, commas
// are ignored, `x*n` and `(...)*n` repeat. All V at the start, then exactly one E, one L at the
// end, all e before all t, all m directly before L, num_layers layers. Throws UsageError with the
// position of the error.
std::vector<StageSlice> parse_layout(std::string_view text, int64_t num_layers);
// How often a letter stands in such a string. Throws UsageError.
int64_t count_layout_letters(std::string_view text, char letter);

}  // namespace megatron
