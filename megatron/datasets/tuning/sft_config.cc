#include "megatron/datasets/tuning/sft_config.h"

namespace megatron {
namespace {

constexpr std::string_view kLossOn[] = {"assistant", "last", "all"};
constexpr std::string_view kLong[] = {"cut", "drop"};
constexpr std::string_view kFormats[] = {"tokenizer", "nemotron-h-aligned", "nemotron-nano-v2",
                                         "identity"};

// The templates of the formats in Megatron-LM's SFTTokenizer.
constexpr const char* kTemplates[] = {
    "",
    "{% for m in messages %}{% set text = m.content.strip() ~ '\\n' %}"
    "{% if m.role == 'system' %}{{ '<SPECIAL_10>System\\n' ~ text }}"
    "{% elif m.role == 'user' %}{{ '<SPECIAL_11>User\\n' ~ text ~ '<SPECIAL_11>Assistant\\n' }}"
    "{% elif m.role == 'assistant' %}{% generation %}{{ text }}{% endgeneration %}{% endif %}{% "
    "endfor %}",
    "{% for m in messages %}{% set plain = m.content.replace('/think', '').replace('/no_think', "
    "'').strip() %}"
    "{% if m.role == 'system' %}{{ '<SPECIAL_10>System\\n' ~ plain ~ '\\n' }}"
    "{% elif m.role == 'user' %}{{ '<SPECIAL_11>User\\n' ~ plain ~ '\\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<SPECIAL_11>Assistant\\n' }}"
    "{% generation %}{{ m.content.strip() ~ '\\n<SPECIAL_12>\\n' }}{% endgeneration %}{% endif "
    "%}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% "
    "endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
};

}  // namespace

void SftConfig::fields(FieldVisitor& v) {
  v.role(FieldRole::kNumerics);
  v.group("sft");
  v.field("sft", sft,
          "train on conversations, as --task sft: the data are JSON lines or Parquet files of "
          "conversations");
  v.field("chat_template", chat_template,
          "Jinja template that turns a conversation into text: a file, or the template itself; "
          "default: the one next to the "
          "tokenizer");
  v.choice("sft_tokenizer_prompt_format", sft_tokenizer_prompt_format, kFormats,
           "format of conversations: the tokenizer's chat template, or one of Megatron-LM's own");
  v.choice("sft_loss_on", sft_loss_on, kLossOn,
           "tokens to train on: what the assistant wrote, only its last turn, or all");
  v.choice("sft_long_conversations", sft_long_conversations, kLong,
           "what happens to conversations that are longer than --seq-length");
}

void SftConfig::validate(Violations& violations) const {
  if (!chat_template.empty() && sft_tokenizer_prompt_format != SftPromptFormat::kTokenizer)
    violations.add("--chat-template and --sft-tokenizer-prompt-format are both given",
                   "give one of them");
}

std::string SftConfig::given_template() const {
  return chat_template.empty() ? kTemplates[static_cast<int>(sft_tokenizer_prompt_format)]
                               : chat_template;
}

}  // namespace megatron
