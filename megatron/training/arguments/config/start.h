// What a run starts from, and which of its parameters it trains.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/fields.h"

namespace megatron {

// kAuto: resume with --load, else fresh
enum class StartChoice { kAuto, kFresh, kResume, kResumeOrFresh };

// Whether a pattern of names matches a parameter's name or a prefix of it that ends before a dot
// ("decoder.layers.0"); *, ? and [...] are shell wildcards and match dots, too.
bool stands_for(const std::string& pattern, std::string_view name);
// Throws UsageError unless the flag's pattern matches some of `names`.
void require_match(const char* flag, const std::string& pattern,
                   const std::vector<std::string>& names);

struct StartConfig {
  std::string load;
  StartChoice start = StartChoice::kAuto;
  std::optional<int64_t> ckpt_step;
  bool no_load_optim = false, finetune = false;
  std::string pretrained_checkpoint;
  bool use_checkpoint_args = false, use_mp_args_from_checkpoint_args = false;
  bool accept_new_data_order = false;
  // PEFT folder that adapters of a new run start from
  std::string adapter;
  std::vector<std::string> freeze, freeze_except;  // patterns, see freezes()
  bool freeze_all_layers = false;
  // Megatron's names of parts of a model with media
  bool freeze_lm = false, freeze_vit = false, freeze_vision_projection = false;

  void fields(FieldVisitor& visitor);
  void finalize();  // adds the parts to `freeze`
  void validate(Violations& v) const;

  // Whether flags freeze the parameter of this name: it has no gradient and no optimizer state, and
  // keeps its bits. Patterns are those of stands_for().
  bool freezes(std::string_view name) const;
  // Throws UsageError for patterns that match none of `names`, and if nothing is left to train
  // without --freeze-all-layers.
  void check_freezing(const std::vector<std::string>& names) const;
};

}  // namespace megatron
