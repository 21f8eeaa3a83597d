#include "drawn_layouts.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <random>

#include "against_one_rank.h"
#include "megatron/base/check.h"
#include "megatron/datasets/masked/t5_dataset.h"

namespace megatron {
namespace {

constexpr int64_t kFp8Unit = 16, kBlock = 128;  // products in FP8 want multiples of it
constexpr int64_t kHybridsWithExperts = 3;      // one of so many models of letters
constexpr int64_t kEncoders = 3;                // one of so many others without FP8 is a BERT

// Draws that are the same with every standard library, which the distributions of <random> are not.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  int64_t range(int64_t first, int64_t last) {
    return first + static_cast<int64_t>(engine_() % static_cast<uint64_t>(last - first + 1));
  }
  bool chance(int percent) { return range(1, 100) <= percent; }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[range(0, static_cast<int64_t>(values.size()) - 1)];
  }
  int64_t divisor(int64_t of) {
    int64_t d = range(1, of);
    while (of % d != 0) d = range(1, of);
    return d;
  }

 private:
  std::mt19937_64 engine_;
};

struct DrawnMesh {
  int64_t tp = 1, pp = 1, cp = 1, dp = 1;
  int64_t size() const { return tp * pp * cp * dp; }
};

// Several ranks, but at most `max_ranks`.
DrawnMesh draw_mesh(Dice& dice, int64_t max_ranks) {
  DrawnMesh mesh;
  const auto axis = [&] {
    return max_ranks > kMaxRanks && dice.chance(50) ? dice.pick<int64_t>({5, 6, 8, 16})
                                                    : dice.pick<int64_t>({1, 1, 1, 2, 2, 3, 4});
  };
  do mesh = {axis(), axis(), axis(), axis()};
  while (mesh.size() == 1 || mesh.size() > max_ranks);
  return mesh;
}

// One attempt at a configuration for a mesh. Sizes mostly divide as the mesh wants them to; the
// rules refuse the others.
class Draw {
 public:
  // `fp8_unit`: 0 without FP8; `stacks`: an encoder and a decoder.
  Draw(Dice& dice, const DrawnMesh& mesh, int64_t max_ranks, int64_t fp8_unit, bool with_experts,
       bool stacks)
      : dice_(dice),
        mesh_(mesh),
        max_ranks_(max_ranks),
        fp8_unit_(fp8_unit),
        experts_(with_experts),
        stacks_(stacks) {
    layers();
    heads();
    positions();
    behavior();
    documents();
    recomputation();
    sequences();
    data_ranks();
    run();
    precision();
    if (stacks_) {
      divide_stacks();
      return;
    }
    vocabulary();
    if (experts_) {
      experts();
      router();
      balance();
      further_tokens();
    }
    if (dice_.chance(20))
      add("--softmax-type", dice_.pick<const char*>({"learnable", "learnable", "off-by-one"}));
    if (!given("--fp32-residual-connection") && !given("--mtp-num-layers") && dice_.chance(20))
      add("--norm-placement", dice_.pick<const char*>({"post", "sandwich", "residual"}));
  }
  // Of a decoder with no flag of documents or causality, a BERT; false: there are some, or the
  // sequence has no room for two texts.
  bool becomes_encoder() {
    if (length_ < 5) return false;
    for (const char* flag : {"--reset-", "--eod-mask", "document-masking",
                             "--pipeline-vocab-parallel", "--mtp-num-layers", "--softmax-type"})
      if (given(flag)) return false;
    add("--task bert");
    maybe(50, "--bert-no-binary-head");
    maybe(30, "--bert-embedding-norm");
    if (dice_.chance(30)) add("--bert-first-position", dice_.range(1, 3));
    encoder_layers();
    maybe(20, "--remove-padding false");
    adapters();
    return true;
  }

  // Of a decoder, one whose layers are letters; false: it has flags that none of those may have.
  bool becomes_hybrid() {
    for (const char* flag : {"--pipeline-model-parallel-layout", "--account-for-",
                             "--num-layers-per-virtual", "--decoder-first", "--decoder-last",
                             "--moe-layer-freq", "--mtp-num-layers", "--norm-placement"})
      if (given(flag)) return false;
    // Products in FP8 want sizes that steps of heads do not have.
    const std::string letters = cat(experts_ ? "*-E" : "*-", fp8_unit_ > 0 ? "" : "MG");
    const auto draw = [&](int64_t count) {
      std::string text;
      for (int64_t i = 0; i < count; ++i)
        text += letters[static_cast<size_t>(dice_.range(0, std::ssize(letters) - 1))];
      return text;
    };
    std::string pattern = draw(num_layers_ + dice_.range(0, 3));
    if (mesh_.pp > 1 && dice_.chance(50)) {
      const int64_t chunks = given("--pipeline-schedule zb-v") ? 2 : dice_.range(1, 2);
      pattern.clear();
      for (int64_t segment = 0; segment < mesh_.pp * chunks; ++segment)
        pattern += (segment > 0 ? "|" : "") + draw(dice_.range(0, 3));
    }
    const std::string layers = cat(" --num-layers ", num_layers_);
    flags_.replace(flags_.find(layers), layers.size(), cat(" --hybrid-layer-pattern ", pattern));
    if (pattern.find('M') != std::string::npos) {
      const int64_t heads = mesh_.tp * dice_.range(1, 3);
      add("--mamba-num-heads", heads);
      add("--mamba-num-groups", dice_.divisor(heads));
      add("--mamba-head-dim", dice_.range(2, 5));
      add("--mamba-state-dim", mesh_.tp * dice_.range(1, 3));
      add("--mamba-chunk-size", dice_.range(1, 9));
    }
    if (pattern.find('G') != std::string::npos) {
      const int64_t keys = mesh_.tp * dice_.range(1, 2);
      add("--linear-num-key-heads", keys);
      add("--linear-num-value-heads", keys * dice_.range(1, 2));
      add("--linear-key-head-dim", dice_.range(2, 6));
      add("--linear-value-head-dim", dice_.range(2, 6));
      add("--linear-conv-kernel-dim", dice_.range(2, 4));
      add("--linear-chunk-size", dice_.range(1, 9));
    }
    return true;
  }

  // Of a decoder, one that reads neighbours; false: it has flags that none of those may have.
  bool becomes_retro() {
    for (const char* flag : {"--reset-", "document-masking", "--pipeline-vocab-parallel",
                             "--softmax-type", "--norm-placement", "--window-size",
                             "--recompute-method block", "--recompute-num-layers 2"})
      if (given(flag)) return false;
    if (num_layers_ == 0) return false;
    add("--task retro");
    const int64_t ranks = given("--sequence-parallel") ? mesh_.tp : 1;
    add("--retro-chunk-length", ranks * dice_.divisor(std::max<int64_t>(1, length_ / ranks)));
    const int64_t first = dice_.range(1, num_layers_);
    std::string layers = cat(first);
    for (int64_t i = first + 1; i <= num_layers_; ++i)
      if (dice_.chance(50)) layers += cat(" ", i);
    add("--retro-layers", layers);
    add("--retro-num-neighbors", dice_.range(1, 3));
    add("--retro-encoder-num-layers", dice_.range(1, 2));
    add("--retro-encoder-hidden-dropout", dice_.pick({0.0, 0.1}));
    add("--retro-encoder-attention-dropout", dice_.pick({0.0, 0.1}));
    const std::string modules = " --recompute-modules";
    if (given(modules.c_str()) && dice_.chance(50))
      flags_.insert(flags_.find(modules) + modules.size(), " retro_encoder");
    return true;
  }

  // Of a decoder, one that reads images or sounds, or both; false: it has flags that none of those
  // may have.
  bool becomes_mimo() {
    for (const char* flag : {"--reset-", "--eod-mask", "document-masking",
                             "--pipeline-vocab-parallel", "--mtp-num-layers", "--fp32-residual"})
      if (given(flag)) return false;
    const int64_t free = max_ranks_ - mesh_.size();
    const bool apart = free > 0 && mesh_.cp == 1 && dice_.chance(35) &&
                       !given("--num-distributed-optimizer-instances");
    const int64_t ranks = apart ? dice_.range(1, std::min<int64_t>(free, 2))  // of a layer
                          : mesh_.tp > 1 && dice_.chance(40) ? mesh_.tp
                                                             : 1,
                  layers = dice_.range(1, 2);
    const bool hears = dice_.chance(40), sees = !hears || dice_.chance(40);
    add("--task mimo");
    if (ranks > 1) add("--encoder-tensor-model-parallel-size", ranks);
    if (apart) {
      const int64_t data = dice_.range(1, std::min<int64_t>(free / ranks, 3));
      add("--encoder-data-parallel-size", data);
      encoder_ranks_ = ranks * data;
    }
    if (sees) images(ranks, layers);
    if (hears) sounds(ranks, layers);
    if (dice_.chance(25)) {
      media_adapters(sees, hears);
    } else if (!given("--freeze") && dice_.chance(40)) {
      const char* const seen = dice_.pick<const char*>(
          {"--freeze vision_model", "--freeze language_model", "--freeze vision_projection",
           "--freeze-except vision_model", "--freeze-except vision_projection"});
      const char* const heard = dice_.pick<const char*>(
          {"--freeze audio_model", "--freeze language_model", "--freeze audio_projection",
           "--freeze-except audio_model", "--freeze-except audio_projection"});
      add(sees && (!hears || dice_.chance(50)) ? seen : heard);
    }
    if (dice_.chance(30)) {
      add("--encoder-recompute-granularity full --encoder-recompute-method",
          dice_.pick<const char*>({"uniform", "block"}));
      add("--encoder-recompute-num-layers", dice_.range(1, layers));
    }
    encoder_offloads();
    if (apart) return true;
    if (mesh_.pp > 1 && dice_.chance(50)) encoder_has_stages(layers);
    bool frozen = false;  // an encoder, as a whole
    for (const char* medium : {"vision", "audio"})
      frozen = frozen || given(cat("--freeze ", medium, "_model").c_str()) ||
               given(cat("--freeze-except ", medium, "_projection").c_str());
    if (frozen && ranks == 1 && !given("optim_grads_params") && dice_.chance(60))
      add("--mimo-encoder-prefetch --mimo-encoder-prefetch-depth", dice_.range(1, 3));
    if (given("--account-for-embedding") && dice_.chance(50)) {
      const std::string embedding = "--account-for-embedding-in-pipeline-split";
      flags_.replace(flags_.find(embedding), embedding.size(),
                     "--account-for-encoder-in-pipeline-split 1");
    }
    return true;
  }

  // Of encoders of which no part is frozen.
  void encoder_offloads() {
    const bool frozen =
        (given("--freeze") && !given("--freeze language_model")) || given("--lora-rank");
    if (frozen || !dice_.chance(40)) return;
    if (given("--encoder-recompute-method uniform")) {
      add("--encoder-offload-modules attn_norm");
      return;
    }
    std::string modules = dice_.pick<const char*>({"core_attn", "mlp_act mlp_fc2"});
    for (const char* module : {"attn_norm", "qkv_linear", "attn_proj", "mlp_norm", "mlp_fc1"})
      if (dice_.chance(50)) modules += cat(" ", module);
    add("--encoder-offload-modules", modules);
  }

  // Of the language model, of encoders, of projectors.
  void media_adapters(bool sees, bool hears) {
    add("--lora-rank", dice_.range(1, 3));
    add("--lora-targets",
        dice_.pick<const char*>({"linear_q linear_k linear_v", "linear_qkv", "linear_fc2"}));
    for (const char* target :
         {"vision_model.all-linear", "vision_projection.linear_fc1", "audio_model.linear_q",
          "audio_model.linear_proj", "audio_projection.linear_fc1"})
      maybe((target[0] == 'v' ? sees : hears) ? 60 : 0, target);
  }

  // An encoder of images whose layers so many ranks divide.
  void images(int64_t ranks, int64_t layers) {
    const bool own_sizes = dice_.chance(40) && turns_by_sections(),
               shuffle = own_sizes || dice_.chance(30), newlines = !shuffle && dice_.chance(40);
    const int64_t side = shuffle ? 4 : 2, heads = ranks * dice_.range(1, 2);
    const char* const encoder = own_sizes
                                    ? dice_.pick<const char*>({"qwen2", "qwen2_5"})
                                    : dice_.pick<const char*>({"clip", "internvit", "siglip"});
    const bool siglip = encoder == std::string_view("siglip"), pool = siglip && !newlines;
    add("--vision-model-type", encoder);
    add("--patch-dim 2 --img-h", side * dice_.range(1, 2));
    add("--img-w", side * dice_.range(1, 2));
    add("--vision-num-layers", layers);
    add("--vision-num-attention-heads", heads);
    add("--vision-hidden-size", heads * (own_sizes ? 4 * dice_.range(1, 2) : dice_.range(4, 8)));
    add("--vision-ffn-hidden-size", ranks * dice_.range(8 / ranks, 24 / ranks));
    if (shuffle)
      add("--pixel-shuffle");
    else if (pool)
      add("--vision-pooling", dice_.range(1, 2));
    maybe(own_sizes ? 0 : 50, "--bidirectional-images");
    maybe(30, "--vision-projection-type affine");
    if (newlines) add("--vision-newlines");
    if (encoder == std::string_view("qwen2_5")) {
      add("--vision-activation silu --vision-window-size", 4 * dice_.range(1, 2));
      maybe(70, "--vision-whole-picture-layers 0");
    }
    maybe(shuffle || newlines || siglip ? 100 : 50, "--disable-vision-class-token");
    maybe(30, "--vision-projection-norm");
    maybe(30, "--disable-vision-qkv-bias");
    add("--image-token-id", dice_.pick<int64_t>({100, 500}));
  }

  // The same of sounds, of one token to three.
  void sounds(int64_t ranks, int64_t layers) {
    const int64_t heads = ranks * dice_.range(1, 2);
    add("--audio-model-type whisper --audio-num-layers", layers);
    add("--audio-num-attention-heads", heads);
    add("--audio-hidden-size", heads * 2 * dice_.range(2, 4));
    add("--audio-ffn-hidden-size", ranks * dice_.range(8 / ranks, 24 / ranks));
    add("--audio-mel-bins", dice_.range(2, 5));
    maybe(50, "--audio-projection-type mlp");
    maybe(50, "--disable-audio-projection-bias");
    add("--audio-token-id", dice_.pick<int64_t>({101, 501}));
  }

  // A layout whose first segments have the encoder, in the place of one of as many segments.
  void encoder_has_stages(int64_t encoder_layers) {
    int64_t segments = mesh_.pp * (given("--pipeline-schedule zb-v") ? 2 : 1);
    for (const char* flag :
         {"--account-for-", "--decoder-first", "--decoder-last", "--num-layers-per-virtual"})
      if (given(flag)) return;
    for (const std::string flag :
         {" --num-virtual-stages-per-pipeline-rank ", " --pipeline-model-parallel-layout "}) {
      const size_t at = flags_.find(flag);
      if (at == std::string::npos) continue;
      const size_t begin = at + flag.size(), end = std::min(flags_.find(' ', begin), flags_.size());
      const std::string value = flags_.substr(begin, end - begin);
      segments =
          value[0] == 'E' ? std::ranges::count(value, '|') + 1 : mesh_.pp * std::stoll(value);
      flags_.erase(at, end - at);
    }
    // Segments with encoders alone, and letters of all; the last one may be the embedding's.
    const int64_t alone =
        encoder_layers == 1 || dice_.chance(50) ? 1 : std::min(encoder_layers, segments - 1);
    const int64_t letters = alone > 1 || dice_.chance(50) ? encoder_layers : 1;
    std::string layout;
    for (int64_t i = 1; i < alone; ++i) layout += "V|";
    std::string rest(static_cast<size_t>(letters - alone + 1), 'V');
    if (rest.size() > 1 && dice_.chance(50)) {
      layout += rest.substr(1) + "|VE";
    } else {
      layout += rest + "|E";
    }
    int64_t left = num_layers_;
    for (int64_t segment = alone + 1; segment < segments; ++segment) {
      const int64_t here = dice_.range(0, std::min<int64_t>(left, 2));
      layout += std::string(static_cast<size_t>(here), 't') + "|";
      left -= here;
    }
    add("--pipeline-model-parallel-layout",
        layout + std::string(static_cast<size_t>(left), 't') + "L");
  }

  // Of plain rotary positions, those of time, rows and columns; false: it has others.
  bool turns_by_sections() {
    constexpr std::string_view kRope = "--position-embedding-type rope";
    const size_t at = flags_.find(kRope);
    if (at == std::string::npos || given("--rotary-interleaved") || given("--use-rope-scaling"))
      return false;
    const int64_t pairs = head_size_ / (given("--rotary-percent") ? 4 : 2),
                  time = dice_.range(0, pairs), rows = dice_.range(0, pairs - time);
    flags_.replace(at, kRope.size(),
                   cat("--position-embedding-type mrope --mrope-section ", time, " ", rows, " ",
                       pairs - time - rows));
    return true;
  }

  // What layers of encoders have since ModernBERT.
  void encoder_layers() {
    maybe(30, "--bert-no-head-bias");
    if (given("--normalization LayerNorm")) maybe(40, "--disable-norm-bias");
    if (!given("--norm-placement post") && !given("--norm-placement residual"))
      maybe(30, "--no-first-input-norm");
    if (const size_t at = flags_.find(" --geglu"); at != std::string::npos && dice_.chance(50))
      flags_.replace(at, std::strlen(" --geglu"), " --exact-geglu");
    const size_t window = flags_.find("--window-size ");
    if (window == std::string::npos) return;
    const size_t left = flags_.find(' ', window) + 1, right = flags_.find(' ', left) + 1;
    flags_.replace(right, 1, std::to_string(dice_.range(0, length_)));  // it was 0
    if (rope_) maybe(50, "--rotary-base-local 50");
  }
  const std::string& flags() const { return flags_; }
  const std::string& precision_flags() const { return precision_; }
  int64_t num_ranks() const { return mesh_.size() + encoder_ranks_; }

 private:
  template <class... Values>
  void add(const char* flag, const Values&... values) {
    flags_ += cat(" ", flag);
    ((flags_ += cat(" ", values)), ...);
  }
  void maybe(int percent, const char* flag) {
    if (dice_.chance(percent)) add(flag);
  }

  // The number of layers, and how stages and micro-batches divide.
  void layers() {
    const int64_t pp = mesh_.pp;
    num_microbatches_ = dice_.range(1, 6);
    if (pp == 1) {
      num_layers_ = dice_.range(1, 3);
      return add("--num-layers", num_layers_);
    }
    add("--pipeline-model-parallel-size", pp);
    maybe(20, "--no-overlap-p2p-communication");
    const std::string schedule =
        dice_.pick<const char*>({"1f1b", "1f1b", "gpipe", "zb-h1", "zb-auto", "zb-v"});
    add("--pipeline-schedule", schedule);
    if (schedule == "zb-auto") {
      if (dice_.chance(30)) add("--zero-bubble-max-pending-backward", dice_.range(pp, 3 * pp));
      if (dice_.chance(30))
        add("--zero-bubble-pass-times", 1, dice_.pick({0.8, 1.1}), dice_.pick({0.7, 1.0}),
            dice_.pick({0.0, 0.1}));
    }
    const int64_t chunks = schedule == "zb-v" ? 2 : dice_.pick<int64_t>({1, 1, 2, 3});
    divide_layers(pp, chunks);
    if (chunks > 1) num_microbatches_ = dice_.range(pp, 2 * pp + 1);
    if (chunks > 1 && schedule != "zb-v" && dice_.chance(30))
      add("--microbatch-group-size-per-virtual-pipeline-stage", dice_.range(pp, num_microbatches_));
  }

  void divide_layers(int64_t pp, int64_t chunks) {
    const auto virtual_stages = [&] {
      if (chunks > 1) add("--num-virtual-stages-per-pipeline-rank", chunks);
    };
    num_layers_ = pp * chunks * dice_.pick<int64_t>({1, 1, 2});
    switch (dice_.range(0, 5)) {
      case 0:  // embedding and head count as layers
        if (dice_.chance(70)) --num_layers_, add("--account-for-embedding-in-pipeline-split");
        if (dice_.chance(70)) --num_layers_, add("--account-for-loss-in-pipeline-split");
        virtual_stages();
        break;
      case 1:  // the ends have their own counts
        if (dice_.chance(60)) {
          const int64_t first = chunks * dice_.range(1, 2);
          add("--decoder-first-pipeline-num-layers", first);
          num_layers_ += first - num_layers_ / pp;
        }
        if (pp > 2 && dice_.chance(60)) add("--decoder-last-pipeline-num-layers", num_layers_ / pp);
        virtual_stages();
        break;
      case 2: {  // every segment has its own count
        std::string layout = "E";
        num_layers_ = 0;
        for (int64_t segment = 0; segment < pp * chunks; ++segment) {
          const int64_t here = dice_.range(0, 2);
          layout += (segment > 0 ? "|" : "") + std::string(static_cast<size_t>(here), 't');
          num_layers_ += here;
        }
        add("--pipeline-model-parallel-layout", layout + "L");
        break;
      }
      case 3:
        if (chunks > 1) {
          add("--num-layers-per-virtual-pipeline-stage", num_layers_ / (pp * chunks));
          break;
        }
        [[fallthrough]];
      default:
        virtual_stages();
    }
    add("--num-layers", num_layers_);
  }

  // Divides the layers over an encoder and a decoder, whose sequences may be shorter or longer.
  void divide_stacks() {
    const std::string task = dice_.chance(30) ? "--task seq2seq" : "--task t5";
    if (num_layers_ < 2)
      return add((task + " --decoder-num-layers 1 --decoder-seq-length 64").c_str());
    const int64_t encoder = dice_.range(1, num_layers_ - 1);
    const std::string layers = cat(" --num-layers ", num_layers_);
    flags_.replace(flags_.find(layers), layers.size(),
                   cat(" ", task, " --encoder-num-layers ", encoder, " --decoder-num-layers ",
                       num_layers_ - encoder));
    if (size_t at = flags_.find("--pipeline-model-parallel-layout"); at != std::string::npos) {
      at = flags_.find('E', at);
      for (int64_t i = 0; i < encoder; ++i) flags_[at = flags_.find('t', at)] = 'e';
    }
    const int64_t needed = t5_needs(length_, 0.15).decoder_positions,
                  length =
                      dice_.chance(30) ? std::max(length_, needed) : needed + dice_.range(0, 8);
    const int64_t unit = mesh_.tp * (mesh_.cp > 1 ? 2 * mesh_.cp : 1);
    add("--decoder-seq-length", (length + unit - 1) / unit * unit);
    adapters();
  }

  void adapters() {
    if (!dice_.chance(25)) return;
    add("--lora-rank", dice_.range(1, 3));
    if (dice_.chance(50))
      add("--lora-targets",
          dice_.pick<const char*>({"linear_q linear_v", "linear_qkv linear_fc1", "linear_k"}));
  }

  void heads() {
    const int64_t unit = mesh_.tp * (dice_.chance(50) ? mesh_.cp : 1);
    const int64_t heads = dice_.chance(90) ? unit * dice_.range(1, std::max<int64_t>(1, 12 / unit))
                                           : dice_.range(1, 12);
    rope_ = dice_.chance(50);
    // Not 2: a LayerNorm of two features is a step function, in which rounding has no bounds.
    const int64_t head_size = fp8_unit_ == kBlock ? dice_.pick<int64_t>({32, 64, 128})
                              : fp8_unit_ > 0     ? dice_.pick<int64_t>({8, 16})
                              : rope_             ? dice_.pick<int64_t>({4, 6, 8})
                                                  : dice_.pick<int64_t>({3, 4, 8});
    add("--num-attention-heads", heads);
    add("--kv-channels", head_size);
    head_size_ = head_size;
    const int64_t unit_of_sizes = fp8_unit_ > 0 ? fp8_unit_ : 8;
    add("--hidden-size", dice_.chance(60) ? heads * head_size : unit_of_sizes * dice_.range(2, 6));
    add("--ffn-hidden-size",
        mesh_.tp * (fp8_unit_ > 0 ? fp8_unit_ * dice_.range(1, 3) : dice_.range(3, 24)));
    if (!stacks_ && dice_.chance(60))
      add("--group-query-attention --num-query-groups", dice_.divisor(heads));
    if (mesh_.tp > 1) add("--tensor-model-parallel-size", mesh_.tp);
    if (mesh_.tp > 1) maybe(experts_ ? 100 : 60, "--sequence-parallel");
  }

  void positions() {
    if (!rope_ && stacks_ && num_layers_ > 1 && dice_.chance(50))
      return add(
          "--position-embedding-type relative --relative-attention-max-distance 17 "
          "--relative-attention-num-buckets",
          2 * dice_.range(2, 16));
    if (!rope_)
      return add("--position-embedding-type",
                 dice_.pick<const char*>({"learned_absolute", "learned_absolute", "none"}));
    add("--position-embedding-type rope --rotary-base", dice_.pick<int64_t>({100, 10000}));
    if (dice_.chance(30)) add("--rotary-percent", 0.5);
    maybe(30, "--rotary-interleaved");
    if (dice_.chance(20)) add("--rotary-seq-len-interpolation-factor", 2);
    maybe(20, "--use-rope-scaling");
  }

  void behavior() {
    add("--normalization", dice_.pick<const char*>({"LayerNorm", "RMSNorm"}));
    maybe(30, "--apply-layernorm-1p");
    maybe(30, "--qk-layernorm");
    maybe(50, "--disable-bias-linear");
    maybe(30, "--add-qkv-bias");
    maybe(50, "--untie-embeddings-and-output-weights");
    if (const char* kind = dice_.pick<const char*>(
            {"", "--swiglu", "--swiglu", "--geglu", "--quick-geglu --glu-linear-offset 1", "--relu",
             "--squared-relu", "--openai-gelu", "--no-bias-gelu-fusion"});
        *kind != '\0')
      add(kind);
    add("--hidden-dropout", dice_.pick({0.0, 0.1, 0.3}));
    add("--attention-dropout", dice_.pick({0.0, 0.0, 0.2}));
    if (dice_.chance(20)) add("--z-loss-coeff", 0.01);
    maybe(20, "--init-method-xavier-uniform");
    if (dice_.chance(20)) add("--embedding-init-method-std", 0.3);
  }

  void documents() {
    if (stacks_) return;
    if (dice_.chance(20)) return add("--dataloader-inter-document-masking");
    maybe(30, "--reset-position-ids");
    maybe(30, "--reset-attention-mask");
    maybe(30, "--eod-mask-loss");
  }

  void recomputation() {
    switch (stacks_ ? dice_.range(2, 5) : dice_.range(0, 5)) {
      case 0:
        return add("--recompute-granularity full --recompute-method uniform --recompute-num-layers",
                   dice_.range(1, 2));
      case 1:
        return add("--recompute-granularity full --recompute-method block --recompute-num-layers",
                   dice_.range(1, 2));
      case 2:
        return add("--recompute-granularity selective --recompute-modules",
                   dice_.pick<const char*>({"core_attn", "layernorm", "core_attn layernorm"}));
      case 3:
        if (stacks_)
          add("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1");
        return;
      default:
        return;
    }
  }

  void sequences() {
    const int64_t cp = mesh_.cp, ranks = 2 * cp * mesh_.tp,
                  unit = fp8_unit_ > 0 ? std::lcm(ranks, fp8_unit_ * cp) : ranks;
    const int64_t length = dice_.chance(90) ? unit * dice_.range(1, std::max<int64_t>(1, 32 / unit))
                                            : dice_.range(4, 32);
    add("--seq-length", length);
    length_ = length;
    if (dice_.chance(30)) add("--max-position-embeddings", length + dice_.range(1, 9));
    if (!stacks_ && dice_.chance(25)) {
      add("--window-size", dice_.range(0, length), 0);
      if (dice_.chance(50)) add("--window-attn-skip-freq", dice_.range(1, 3));
    }
    if (cp == 1) return;
    add("--context-parallel-size", cp);
    const auto type = [&] {
      if (stacks_) return dice_.pick<const char*>({"all_gather", "a2a"});
      return dice_.pick<const char*>({"p2p", "p2p", "all_gather", "a2a", "a2a+p2p"});
    };
    const int64_t types = dice_.chance(70) ? 1 : std::max<int64_t>(1, num_layers_);
    std::string all;
    for (int64_t i = 0; i < types; ++i) all += cat(i > 0 ? " " : "", type());
    add("--cp-comm-type", all);
    if (all.find("a2a+p2p") == std::string::npos) return;
    const int64_t inner = dice_.divisor(cp);
    add("--hierarchical-context-parallel-sizes", inner, cp / inner);
  }

  void data_ranks() {
    maybe(30, "--use-tp-pp-dp-mapping");
    const bool overlap = dice_.chance(50);
    const int sharding = static_cast<int>(dice_.range(0, 3));
    if (sharding == 1) add("--use-distributed-optimizer");
    if (sharding > 1)
      add("--use-megatron-fsdp --data-parallel-sharding-strategy",
          sharding == 2 ? "optim_grads" : "optim_grads_params");
    if (overlap)
      add(sharding > 0 ? "--overlap-grad-reduce --overlap-param-gather" : "--overlap-grad-reduce");
    if (sharding > 0 && dice_.chance(20))
      add("--num-distributed-optimizer-instances", dice_.divisor(mesh_.dp * mesh_.cp));
    if (sharding < 3) {
      if (dice_.chance(30))
        add("--ddp-bucket-size", dice_.pick<int64_t>({1, 500, 5000}));
      else if (dice_.chance(20))
        add("--ddp-num-buckets", dice_.range(1, 5));
    }
  }

  void run() {
    const int64_t micro_batch_size = dice_.range(1, 3);
    add("--micro-batch-size", micro_batch_size);
    add("--global-batch-size", micro_batch_size * num_microbatches_ * mesh_.dp);
    add("--vocab-size", dice_.range(20, 150));
    add("--make-vocab-size-divisible-by", dice_.pick<int64_t>({1, 8, 128}));
    add("--seed", dice_.range(1, 1000));
    add("--optimizer", dice_.pick<const char*>({"adam", "adam", "sgd"}));
    add("--clip-grad", dice_.pick({0.0, 0.1, 1.0}));
    add("--weight-decay", dice_.pick({0.0, 0.1}));
    maybe(20, "--no-calculate-per-token-loss");
    if (dice_.chance(20)) add("--decoupled-lr", 2e-2);
    if (dice_.chance(20)) add("--apply-wd-to-qk-layernorm");
    if (dice_.chance(20)) add("--lr-warmup-iters", 2);
  }

  // Flags of the proof, which runs in the type that they say.
  void precision() {
    if (fp8_unit_ == kBlock) {
      precision_ = cat(" --bf16 --fp8-recipe blockwise --fp8-format ",
                       dice_.pick<const char*>({"hybrid", "e4m3"}));
      return;
    }
    if (fp8_unit_ > 0) {
      precision_ = cat(" --bf16 --fp8-format ", dice_.pick<const char*>({"hybrid", "e4m3"}),
                       " --fp8-recipe ", dice_.pick<const char*>({"delayed", "tensorwise"}));
      if (dice_.chance(30)) precision_ += cat(" --fp8-amax-history-len ", dice_.range(1, 20));
      return;
    }
    if (dice_.chance(50)) return;
    if (dice_.chance(8)) {
      precision_ = " --fp16";
      if (dice_.chance(50)) precision_ += " --loss-scale 1024";
      return;
    }
    precision_ = " --bf16";
    if (dice_.chance(30)) precision_ += " --fp32-residual-connection";
    if (dice_.chance(30)) precision_ += " --grad-reduce-in-bf16";
    if (dice_.chance(20))
      precision_ += " --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16";
    if (dice_.chance(10)) precision_ += " --use-precision-aware-optimizer --main-params-dtype bf16";
  }

  bool given(const char* flag) const {
    return (flags_ + precision_).find(flag) != std::string::npos;
  }

  // Where the stages may divide it.
  void vocabulary() {
    if (mesh_.pp > 1 && given("--pipeline-schedule 1f1b") && given("--untie-embeddings") &&
        !given("virtual") && !given("--account-for-loss"))
      maybe(50, "--pipeline-vocab-parallel");
  }

  // Experts on the ranks of a stage.
  void experts() {
    const int64_t stage = mesh_.tp * mesh_.cp * mesh_.dp;
    int64_t tensor = mesh_.tp;
    if (dice_.chance(50)) {
      tensor = dice_.chance(60) ? 1 : dice_.divisor(stage);
      add("--expert-tensor-parallel-size", tensor);
    }
    const int64_t ranks = stage % tensor == 0 ? dice_.divisor(stage / tensor) : 1;
    num_experts_ = ranks * dice_.range(1, 4);
    add("--num-experts", num_experts_);
    add("--expert-model-parallel-size", ranks);
    add("--moe-token-dispatcher-type", dice_.pick<const char*>({"allgather", "alltoall"}));
    if (dice_.chance(50)) add("--moe-ffn-hidden-size", tensor * dice_.range(2, 12));
    if (dice_.chance(30)) add("--moe-layer-freq", dice_.range(1, 3));
    if (dice_.chance(30)) {
      add("--moe-shared-expert-intermediate-size", mesh_.tp * dice_.range(2, 8));
      maybe(50, "--moe-shared-expert-gate");
    }
    if (dice_.chance(20)) add("--moe-latent-size", dice_.range(4, 16));
    if (dice_.chance(30)) add("--moe-expert-rank-capacity-factor", dice_.pick({1.0, 1.25, 2.0}));
    if (dice_.chance(20))
      add("--recompute-granularity selective --recompute-modules",
          dice_.pick<const char*>({"moe", "moe_act", "moe core_attn"}));
  }

  void router() {
    int64_t most = num_experts_;
    if (num_experts_ % 4 == 0 && dice_.chance(30)) {
      const int64_t kept = dice_.range(1, 2);
      add("--moe-router-num-groups 4 --moe-router-group-topk", kept);
      most = num_experts_ / 4 * kept;
      if (dice_.chance(50)) add("--moe-router-group-score max");
    }
    const int64_t k = dice_.range(1, std::min<int64_t>(most, 4));
    add("--moe-router-topk", k);
    const std::string score = dice_.pick<const char*>({"softmax", "sigmoid", "sqrtsoftplus"});
    add("--moe-router-score-function", score);
    if (score == "softmax")
      maybe(k == 1 ? 100 : 50, "--moe-router-pre-softmax");
    else
      maybe(50, "--moe-router-enable-expert-bias");
    if (dice_.chance(30)) add("--moe-router-topk-scaling-factor", 2.5);
    if (k == 1) maybe(30, "--moe-apply-probs-on-input");
    if (dice_.chance(20)) add("--moe-input-jitter-eps", 0.1);
  }

  // Not what each rank applies to its own rows, unless these are a whole micro-batch.
  void balance() {
    const bool drops = mesh_.tp * mesh_.cp == 1 && dice_.chance(20);
    if (drops) {
      add("--moe-expert-capacity-factor", dice_.pick({0.5, 1.0, 1.5}));
      if (dice_.chance(50)) add("--moe-token-drop-policy position");
      maybe(50, "--moe-pad-expert-input-to-capacity");
    }
    if (dice_.chance(30)) add("--moe-z-loss-coeff", 0.05);
    // Losses over the data ranks are compared with larger micro-batches of one rank.
    const bool means = flags_.find("--no-calculate-per-token-loss") != std::string::npos;
    switch (dice_.range(drops || means ? 3 : 0, 5)) {
      case 3:
        return add("--moe-aux-loss-coeff 0.1");
      case 0:
        return add("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1");
      case 1:
        return add(
            "--moe-router-load-balancing-type seq_aux_loss global_aux_loss --moe-aux-loss-coeff "
            "0.1 0.05");
      case 4:
        return add("--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1");
      default:
        return;
    }
  }

  // Layers of multi-token prediction have experts too.
  void further_tokens() {
    if (!dice_.chance(20)) return;
    add("--mtp-num-layers", dice_.range(1, 2));
    maybe(30, "--mtp-use-repeated-layer");
  }

  Dice& dice_;
  const DrawnMesh mesh_;
  const int64_t max_ranks_;
  int64_t encoder_ranks_ = 0;  // of their own
  const int64_t fp8_unit_;
  const bool experts_, stacks_;
  std::string flags_, precision_;
  int64_t num_layers_ = 1, num_microbatches_ = 1, num_experts_ = 0, length_ = 0, head_size_ = 0;
  bool rope_ = false;
};

constexpr const char* kCommon =
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --train-iters 5 --lr 1e-2 "
    "--init-method-std 0.2 "
    "--eval-iters 0 --device cpu";

}  // namespace

DrawnLayout legal_configuration(uint64_t seed, int64_t max_ranks) {
  Dice dice(seed);
  const bool mimo = seed >= kFirstOfMimo, retro = !mimo && seed >= kFirstOfRetro,
             hybrids = !mimo && !retro && seed >= kFirstOfHybrids,
             encoders = !mimo && !retro && !hybrids && seed >= kFirstOfEncoders,
             blocks = !mimo && !retro && !hybrids && !encoders && seed >= kFirstOfBlocks,
             stacks = !mimo && !retro && !hybrids && !encoders && !blocks && seed >= kFirstOfStacks,
             experts = (seed >= kFirstOfExperts && seed < kFirstOfStacks) ||
                       (hybrids && seed % kHybridsWithExperts == 0);
  DrawnMesh mesh = draw_mesh(dice, max_ranks);
  while (retro && mesh.cp > 1) mesh = draw_mesh(dice, max_ranks);
  const bool fp8 =
      blocks || (!stacks && !experts && !encoders && !retro && !mimo && dice.chance(34));
  const bool encoder = encoders || (!stacks && !experts && !hybrids && !retro && !mimo && !fp8 &&
                                    seed % kEncoders == 0);
  std::string refusal;
  for (int attempt = 0; attempt < 1000; ++attempt) {
    Draw draw(dice, mesh, max_ranks, blocks ? kBlock : fp8 ? kFp8Unit : 0, experts, stacks);
    if (encoder && !draw.becomes_encoder()) continue;
    if (hybrids && !draw.becomes_hybrid()) continue;
    if (retro && !draw.becomes_retro()) continue;
    if (mimo && !draw.becomes_mimo()) continue;
    const DrawnLayout drawn{static_cast<int>(draw.num_ranks()), kCommon + draw.flags(),
                            draw.precision_flags()};
    try {
      parse_run(drawn.flags + drawn.precision, drawn.world_size);
      return drawn;
    } catch (const UsageError& error) {
      refusal = error.what();
    }
  }
  throw_error(cat("no legal configuration of ", mesh.size(),
                  " ranks in 1000 attempts; the last refusal: ", refusal));
}

}  // namespace megatron
