#include "megatron/serving/detail/tokenizer_routes.h"

#include "megatron/base/json_writer.h"
#include "megatron/serving/detail/log_probability_json.h"
#include "megatron/serving/detail/request_members.h"

namespace megatron {
namespace {

void write_special(const char* name, std::optional<int32_t> id, const Tokenizer& tokenizer,
                   JsonWriter& json) {
  json.key(name);
  id ? json.value(tokenizer.token_bytes(*id)) : json.null();
  json.key(cat(name, "_id"));
  id ? json.value(*id) : json.null();
}

}  // namespace

std::string tokenize_json(std::string_view body, const ServedModel& model,
                          const ServeLimits& limits) {
  const JsonDocument document(body, static_cast<size_t>(limits.max_json_depth));
  JsonObject json = document.root();
  std::vector<int32_t> ids;
  bool with_texts = false;
  if (json.has("messages")) {
    // A conversation is read as for a reply.
    GenerationRequest request = parse_chat(body, model, limits);
    request.max_tokens = 1;
    request.ids_alone = true;
    prepare(request, model, 0);
    ids = request.prompts[0].ids;
    with_texts = json.boolean("return_token_strs").value_or(false);
  } else {
    const auto prompt = json.text("prompt");
    if (!prompt) throw ApiError(400, "prompt", "prompt is missing");
    if (json.boolean("add_special_tokens").value_or(true)) ids = model.tokenizer->prefix_ids();
    model.tokenizer->encode_append(*prompt, ids);
    with_texts = json.boolean("return_token_strs").value_or(false);
  }
  JsonWriter out;
  out.begin_object()
      .member("count", ids.size())
      .member("max_model_len", model.limits.max_positions)
      .member("tokens", ids)
      .key("token_strs");
  if (with_texts) {
    out.begin_array();
    for (const int32_t id : ids) out.value(token_text(*model.tokenizer, id, false));
    out.end_array();
  } else {
    out.null();
  }
  return out.end_object().text();
}

std::string detokenize_json(std::string_view body, const ServedModel& model,
                            const ServeLimits& limits) {
  const JsonDocument document(body, static_cast<size_t>(limits.max_json_depth));
  JsonObject json = document.root();
  const auto tokens = json.any("tokens");
  if (!tokens) throw ApiError(400, "tokens", "tokens is missing");
  JsonWriter out;
  out.begin_object().member("prompt",
                            text_of(*model.tokenizer, read_ids(*tokens, "tokens", model)));
  return out.end_object().text();
}

std::string tokenizer_info_json(const ServedModel& model) {
  const Tokenizer& tokenizer = *model.tokenizer;
  JsonWriter json;
  json.begin_object();
  write_special("bos_token", tokenizer.bos(), tokenizer, json);
  write_special("eos_token", tokenizer.eod(), tokenizer, json);
  write_special("pad_token", tokenizer.pad(), tokenizer, json);
  json.member("vocab_size", tokenizer.vocab_size())
      .member("model_max_length", model.limits.max_positions)
      .member("add_bos_token", !tokenizer.prefix_ids().empty())
      .key("chat_template");
  model.chat_template != nullptr ? json.value(model.chat_template->source()) : json.null();
  return json.end_object().text();
}

}  // namespace megatron
