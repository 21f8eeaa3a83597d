#include "megatron/inference/config/speculation_config.h"

#include "megatron/base/check.h"
#include "megatron/scheduling/prompt_lookup.h"

namespace megatron {
namespace {

// Beyond these a step would rather take other requests.
constexpr int64_t kMostDrafts = 64;
constexpr int64_t kLongestMatch = 1024;

}  // namespace

void SpeculationConfig::fields(FieldVisitor& v) {
  v.group("speculative decoding");
  v.field("num_speculative_tokens", num_speculative_tokens,
          "tokens that are guessed at a time, and computed in one step; those that equal what the "
          "model draws stand. 0: none");
  v.field("speculative_model", speculative_model,
          "folder of a smaller model of the same vocabulary that guesses them, on the first rank; "
          "without one they are looked up in the text");
  v.field("ngram_prompt_lookup_min", ngram_prompt_lookup_min,
          "tokens are guessed where at least so many of the last ones occur earlier in the text");
  v.field("ngram_prompt_lookup_max", ngram_prompt_lookup_max,
          "the longest match of last tokens that is told from a longer one");
}

void SpeculationConfig::validate(Violations& v) const {
  v.require(num_speculative_tokens >= 0 && num_speculative_tokens <= kMostDrafts,
            cat("--num-speculative-tokens ", num_speculative_tokens, " is outside [0, ",
                kMostDrafts, "]"));
  v.require(speculative_model.empty() || num_speculative_tokens > 0,
            "--speculative-model has no effect without --num-speculative-tokens",
            "--num-speculative-tokens 4");
  v.require(ngram_prompt_lookup_min >= 1 && ngram_prompt_lookup_min <= kLongestMatch,
            cat("--ngram-prompt-lookup-min ", ngram_prompt_lookup_min, " is outside [1, ",
                kLongestMatch, "]"));
  v.require(ngram_prompt_lookup_max >= ngram_prompt_lookup_min &&
                ngram_prompt_lookup_max <= kLongestMatch,
            cat("--ngram-prompt-lookup-max ", ngram_prompt_lookup_max, " is outside [",
                ngram_prompt_lookup_min, ", ", kLongestMatch, "]"),
            "it is at least --ngram-prompt-lookup-min");
}

void SpeculationConfig::check(const ModelConfig& model) const {
  if (num_speculative_tokens == 0) return;
  MEGATRON_CHECK(model.type != "retro",
                 "--num-speculative-tokens is not built for a model with retrieval");
}

void SpeculationConfig::apply(SchedulerConfig& scheduler) const {
  if (num_speculative_tokens == 0) return;
  scheduler.max_drafts = static_cast<int32_t>(num_speculative_tokens);
  if (!speculative_model.empty()) return;
  scheduler.draft_source =
      std::make_shared<PromptLookup>(ngram_prompt_lookup_min, ngram_prompt_lookup_max);
}

}  // namespace megatron
