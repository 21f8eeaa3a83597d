// The flags of supervised fine-tuning on conversations; the flags that name the files are in
// DataConfig.
#pragma once

#include <string>

#include "megatron/base/fields.h"
#include "megatron/datasets/data_config.h"

namespace megatron {

enum class SftLossOn { kAssistant, kLast, kAll };
enum class SftLongConversations { kCut, kDrop };
// The formats that Megatron-LM has built in; kTokenizer: the tokenizer's own chat template.
enum class SftPromptFormat { kTokenizer, kNemotronHAligned, kNemotronNanoV2, kIdentity };

struct SftConfig : Config {
  bool sft = false;
  std::string chat_template;  // a file, or the template itself; empty: that of the format
  SftPromptFormat sft_tokenizer_prompt_format = SftPromptFormat::kTokenizer;
  SftLossOn sft_loss_on = SftLossOn::kAssistant;
  SftLongConversations sft_long_conversations = SftLongConversations::kCut;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;

  // The template that the flags give, for load_chat_template(); empty: the tokenizer's.
  std::string given_template() const;
};

}  // namespace megatron
