#include "megatron/inference/speculation/served_draft.h"

#include <algorithm>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/inference/memory_plan.h"
#include "megatron/models/model_table.h"

namespace megatron {
namespace {

LoadModelRequest draft_request(const LoadModelRequest& target, const std::string& folder) {
  LoadModelRequest request = target;
  request.load = folder;
  request.adapter.clear();
  request.ckpt_step.reset();
  request.agreement = nullptr;
  request.dummy_weights = false;
  request.accept = [folder](const ModelConfig& model, const Tokenizer*) {
    check_draft_model(folder, model);
  };
  return request;
}

LoadedModel load_logged(const LoadModelRequest& request, const ParallelGroups& groups) {
  LoadedModel loaded = load_model(request, groups);
  for (const std::string& warning : loaded.warnings) log_warning(warning);
  log_info(cat("loaded a draft model, iteration ", loaded.iteration, ", from ",
               loaded.directory.string()));
  return loaded;
}

}  // namespace

void check_draft_model(const std::string& folder, const ModelConfig& model) {
  const ModelType& type = find_model_type(model.type);
  const StageSlice all{.first_layer = 0, .num_layers = model.transformer.num_layers};
  MEGATRON_CHECK(type.decodes && kept_bytes(model, all, 1, sizeof(float)).sequence == 0,
                 "--speculative-model ", folder,
                 ": a draft model is a decoder without states of fixed size, and this is ",
                 type.decodes ? "a model of Mamba-2 layers or gated delta nets"
                              : cat("a model of type ", type.title));
}

LoadedDraft::LoadedDraft(const LoadModelRequest& target, const std::string& folder)
    : request_(draft_request(target, folder)), loaded_(load_logged(request_, groups_)) {}

void LoadedDraft::check_vocabulary(const Tokenizer& of_target) const {
  const Tokenizer& own = *loaded_.tokenizer;
  const std::string which = cat("--speculative-model ", request_.load.string(), ": ");
  constexpr const char* kVocabularyHint =
      "\nhint: a draft model has the vocabulary of the model that it guesses for";
  MEGATRON_CHECK(own.vocab_size() == of_target.vocab_size(), which, "its tokenizer has ",
                 own.vocab_size(), " ids, that of the model ", of_target.vocab_size(),
                 kVocabularyHint);
  for (int32_t id = 0; id < own.vocab_size(); ++id) {
    const std::string token = own.id_to_token(id), other = of_target.id_to_token(id);
    MEGATRON_CHECK(token == other, which, "id ", id, " is \"", token, "\", in the model \"", other,
                   "\"", kVocabularyHint);
  }
}

std::unique_ptr<LoadedDraft> load_draft(const LoadModelRequest& target,
                                        const SpeculationConfig& config) {
  if (config.speculative_model.empty()) return nullptr;
  return std::make_unique<LoadedDraft>(target, config.speculative_model);
}

std::function<void(const ModelConfig&, const Tokenizer*)> accepts_drafts(
    const SpeculationConfig& config, const LoadedDraft* draft) {
  return [&config, draft](const ModelConfig& model, const Tokenizer* tokenizer) {
    config.check(model);
    if (draft != nullptr && tokenizer != nullptr) draft->check_vocabulary(*tokenizer);
  };
}

ServedDraft::ServedDraft(std::unique_ptr<LoadedDraft> draft, const RunnerOptions& runner,
                         const DraftModelOptions& options)
    : draft_(std::move(draft)),
      weights_(
          *draft_->loaded().store,
          [this](const std::string&) {
            LoadModelRequest again = draft_->request();
            again.dtype = draft_->loaded().dtype;
            return read_weights(again, *draft_->loaded().model);
          },
          draft_->loaded().directory.string()),
      runner_(*draft_->loaded().model, weights_, runner),
      drafts_(std::make_shared<DraftModel>(runner_, options)) {}

}  // namespace megatron
