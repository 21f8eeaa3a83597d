#include "megatron/interop/huggingface/hf_fields.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/dist_checkpointing/foreign/torch_dist.h"

namespace megatron {

using nlohmann::ordered_json;

namespace {

std::string short_text(const ordered_json& value) {
  const std::string text = value.dump(-1, ' ', true, ordered_json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 60) + "..." : text;
}

[[noreturn]] void wrong_type(const std::string& name, std::string_view key,
                             const ordered_json& value, const char* expected) {
  throw_error(cat(name, ": ", key, " is ", short_text(value), ", expected ", expected));
}

[[noreturn]] void absent(const std::string& name, std::string_view key) {
  throw_error(cat(name, ": has no ", key));
}

// The value of a key, or null.
const ordered_json* member_of(const ordered_json& object, std::string_view key) {
  const auto found = object.find(std::string(key));
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

constexpr const char* kDownload =
    "\nhint: a configuration is an object with a model_type; download the file again";

// nlohmann's message after "parse error at line 1, column 2: ", in printable characters.
std::string reason_of(const std::string& what) {
  const size_t column = what.find(", column ");
  const size_t begin = column == std::string::npos ? 0 : what.find(": ", column) + 2;
  std::string reason;
  for (const char c : what.substr(begin, 200)) reason += c >= ' ' && c <= '~' ? c : '?';
  return reason;
}

[[noreturn]] void refuse_json(const std::string& text, const std::string& name,
                              const nlohmann::json::parse_error& error) {
  // `byte` counts the bytes read, including the offending one.
  const size_t at = std::min(error.byte == 0 ? 0 : error.byte - 1, text.size());
  const auto line = 1 + std::count(text.begin(), text.begin() + static_cast<ptrdiff_t>(at), '\n');
  const size_t newline = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
  const size_t column = at - (newline == std::string::npos ? 0 : newline + 1) + 1;
  const std::string_view rest = std::string_view(text).substr(at);
  const bool no_number = rest.starts_with("Infinity") || rest.starts_with("NaN");
  throw_error(cat(name, ":", line, ":", column, ": is not JSON: ",
                  no_number ? "Infinity and NaN are no numbers of JSON" : reason_of(error.what()),
                  no_number ? "\nhint: write the number that is meant, or null" : kDownload));
}

// transformers 4 wrote a bare Infinity, which JSON has not, as the largest time step of a Mamba.
std::string with_infinite_limits(std::string text) {
  constexpr std::string_view kKey = "\"time_step_limit\"", kBare = "Infinity";
  const size_t key = text.find(kKey), end = key == text.npos ? key : text.find(']', key);
  if (end == text.npos) return text;
  const size_t at = text.substr(0, end).find(kBare, key);
  if (at != text.npos && text[at - 1] != '"')
    text.replace(at, kBare.size(), "{\"__float__\": \"Infinity\"}");
  return text;
}

double to_number(const std::string& name, std::string_view key, const ordered_json& value) {
  if (!value.is_number()) wrong_type(name, key, value, "a number");
  return value.get<double>();
}

// Accepts 10000 and 10000.0. All such values are sizes.
int64_t to_integer(const std::string& name, std::string_view key, const ordered_json& value) {
  constexpr double kLargest = 2147483647.0;
  const double number = value.is_number() ? value.get<double>() : 0.5;
  if (number != std::floor(number)) wrong_type(name, key, value, "a whole number");
  if (number < 0 || number > kLargest) wrong_type(name, key, value, "0 to 2147483647");
  return static_cast<int64_t>(number);
}

int64_t to_signed_integer(const std::string& name, std::string_view key,
                          const ordered_json& value) {
  if (!value.is_number_integer()) wrong_type(name, key, value, "a whole number");
  return value.get<int64_t>();
}

bool to_bool(const std::string& name, std::string_view key, const ordered_json& value) {
  if (!value.is_boolean()) wrong_type(name, key, value, "true or false");
  return value.get<bool>();
}

std::string to_text(const std::string& name, std::string_view key, const ordered_json& value) {
  if (!value.is_string()) wrong_type(name, key, value, "a string");
  return value.get<std::string>();
}

std::vector<double> to_numbers(const std::string& name, std::string_view key,
                               const ordered_json& value) {
  if (!value.is_array()) wrong_type(name, key, value, "a list of numbers");
  std::vector<double> numbers;
  for (const ordered_json& item : value) numbers.push_back(to_number(name, key, item));
  return numbers;
}

}  // namespace

struct HfFields::Impl {
  ordered_json json;
  std::string name;
  bool reading = true;

  const ordered_json* find(std::string_view key) const { return member_of(json, key); }
  template <class T>
  void read(std::string_view key, T& value, const std::optional<T>& missing,
            T (*convert)(const std::string&, std::string_view, const ordered_json&)) const {
    const ordered_json* found = find(key);
    if (found == nullptr && !missing) absent(name, key);
    value = found != nullptr ? convert(name, key, *found) : *missing;
  }
};

HfFields::HfFields(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HfFields::HfFields(HfFields&&) noexcept = default;
HfFields::~HfFields() = default;

HfFields::HfFields(const std::string& text, std::string name) : impl_(std::make_unique<Impl>()) {
  impl_->name = std::move(name);
  MEGATRON_CHECK(text.find_first_not_of(" \t\r\n") != std::string::npos, impl_->name, ": is empty",
                 kDownload);
  try {
    impl_->json = ordered_json::parse(with_infinite_limits(text));
  } catch (const nlohmann::json::parse_error& error) {
    refuse_json(text, impl_->name, error);
  }
  MEGATRON_CHECK(impl_->json.is_object(), impl_->name, ": holds ", impl_->json.type_name(), " ",
                 short_text(impl_->json), ", expected an object with the settings of a model",
                 kDownload);
}

HfFields HfFields::writer(const std::string& base) {
  HfFields fields(base, "the configuration to write over");
  fields.impl_->reading = false;
  return fields;
}

bool HfFields::reading() const { return impl_->reading; }
const std::string& HfFields::name() const { return impl_->name; }
std::string HfFields::text() const { return impl_->json.dump(2) + "\n"; }

void HfFields::integer(std::string_view key, int64_t& value, std::optional<int64_t> missing) {
  if (reading()) return impl_->read(key, value, missing, to_integer);
  impl_->json[std::string(key)] = value;
}

void HfFields::signed_integer(std::string_view key, int64_t& value,
                              std::optional<int64_t> missing) {
  if (reading()) return impl_->read(key, value, missing, to_signed_integer);
  impl_->json[std::string(key)] = value;
}

std::string HfFields::part(std::string_view key) const {
  const ordered_json* found = impl_->find(key);
  if (found == nullptr) return "{}";
  if (!found->is_object()) wrong_type(name(), key, *found, "an object");
  return found->dump(2);
}

void HfFields::number(std::string_view key, double& value, std::optional<double> missing) {
  if (reading()) return impl_->read(key, value, missing, to_number);
  impl_->json[std::string(key)] = value;
}

void HfFields::flag(std::string_view key, bool& value, std::optional<bool> missing) {
  if (reading()) return impl_->read(key, value, missing, to_bool);
  impl_->json[std::string(key)] = value;
}

void HfFields::text(std::string_view key, std::string& value, std::optional<std::string> missing) {
  if (reading()) return impl_->read(key, value, missing, to_text);
  impl_->json[std::string(key)] = value;
}

void HfFields::number_or_null(std::string_view key, double& value, double missing) {
  if (!reading()) {
    impl_->json[std::string(key)] = value == 0.0 ? ordered_json() : ordered_json(value);
    return;
  }
  if (!impl_->json.contains(std::string(key))) {
    value = missing;
    return;
  }
  const ordered_json* found = impl_->find(key);
  value = found != nullptr ? to_number(name(), key, *found) : 0.0;
}

void HfFields::integer_or_null(std::string_view key, std::optional<int64_t>& value,
                               std::optional<int64_t> missing) {
  if (!reading()) {
    impl_->json[std::string(key)] = value ? ordered_json(*value) : ordered_json();
    return;
  }
  value = impl_->json.contains(std::string(key)) ? find_integer(key) : missing;
}

void HfFields::integers(std::string_view key, std::vector<int64_t>& values,
                        const std::vector<int64_t>& missing) {
  if (!reading()) {
    impl_->json[std::string(key)] = values;
    return;
  }
  values.clear();
  const ordered_json* found = impl_->find(key);
  if (found == nullptr) {
    values = missing;
    return;
  }
  if (!found->is_array()) wrong_type(name(), key, *found, "a list of whole numbers");
  for (const ordered_json& value : *found) values.push_back(to_integer(name(), key, value));
}

void HfFields::only(std::span<const std::string_view> known) const {
  // Of PretrainedConfig, which transformers 4 wrote into every part.
  constexpr std::string_view kOfAll[] = {"_attn_implementation_autoset",
                                         "_name_or_path",
                                         "add_cross_attention",
                                         "architectures",
                                         "bad_words_ids",
                                         "begin_suppress_tokens",
                                         "bos_token_id",
                                         "chunk_size_feed_forward",
                                         "cross_attention_hidden_size",
                                         "decoder_start_token_id",
                                         "diversity_penalty",
                                         "do_sample",
                                         "dtype",
                                         "early_stopping",
                                         "encoder_no_repeat_ngram_size",
                                         "eos_token_id",
                                         "exponential_decay_length_penalty",
                                         "finetuning_task",
                                         "forced_bos_token_id",
                                         "forced_eos_token_id",
                                         "id2label",
                                         "initializer_range",
                                         "is_decoder",
                                         "is_encoder_decoder",
                                         "label2id",
                                         "length_penalty",
                                         "max_length",
                                         "min_length",
                                         "model_type",
                                         "no_repeat_ngram_size",
                                         "num_beam_groups",
                                         "num_beams",
                                         "num_return_sequences",
                                         "output_attentions",
                                         "output_hidden_states",
                                         "output_scores",
                                         "pad_token_id",
                                         "prefix",
                                         "problem_type",
                                         "pruned_heads",
                                         "remove_invalid_values",
                                         "repetition_penalty",
                                         "return_dict",
                                         "return_dict_in_generate",
                                         "sep_token_id",
                                         "suppress_tokens",
                                         "task_specific_params",
                                         "temperature",
                                         "tf_legacy_loss",
                                         "tie_encoder_decoder",
                                         "tie_word_embeddings",
                                         "tokenizer_class",
                                         "top_k",
                                         "top_p",
                                         "torch_dtype",
                                         "torchscript",
                                         "transformers_version",
                                         "typical_p",
                                         "use_bfloat16",
                                         "use_cache"};
  for (const auto& [key, value] : impl_->json.items())
    MEGATRON_CHECK(std::ranges::find(known, key) != known.end() ||
                       std::ranges::find(kOfAll, key) != std::end(kOfAll),
                   name(), ": ", key, " is not known, so that it cannot be said what it changes",
                   "\nhint: remove it if it changes nothing");
}

void HfFields::sides(std::string_view key, int64_t& height, int64_t& width, int64_t missing) {
  if (!reading()) {
    impl_->json[std::string(key)] = {height, width};
    return;
  }
  height = width = missing;
  const ordered_json* found = impl_->find(key);
  if (found == nullptr) return;
  if (found->is_array() && found->size() != 2)
    wrong_type(name(), key, *found, "a whole number, or a list of two");
  height = to_integer(name(), key, found->is_array() ? found->at(0) : *found);
  width = to_integer(name(), key, found->is_array() ? found->at(1) : *found);
}

void HfFields::constant(std::string_view key, std::string_view json) {
  const ordered_json expected = ordered_json::parse(json);
  if (!reading()) {
    impl_->json[std::string(key)] = expected;
    return;
  }
  const ordered_json* found = impl_->find(key);
  MEGATRON_CHECK(found == nullptr || *found == expected, name(), ": ", key, " ", short_text(*found),
                 " is not built, only ", json);
}

bool HfFields::is_text(std::string_view key, std::string_view value) const {
  const ordered_json* found = impl_->find(key);
  return found != nullptr && found->is_string() && found->get<std::string>() == value;
}

std::optional<int64_t> HfFields::find_integer(std::string_view key) const {
  const ordered_json* found = impl_->find(key);
  if (found == nullptr) return std::nullopt;
  return to_integer(name(), key, *found);
}

void HfFields::num_labels(int64_t& value) {
  const ordered_json* names = impl_->find("id2label");
  MEGATRON_CHECK(names == nullptr || names->is_object(), name(), ": id2label is no object");
  if (reading()) {
    value = names != nullptr ? std::ssize(*names) : find_integer("num_labels").value_or(2);
    MEGATRON_CHECK(value > 0, name(), ": id2label and num_labels name no class");
    return;
  }
  if (names != nullptr && std::ssize(*names) == value) return;
  ordered_json by_id = ordered_json::object(), by_name = ordered_json::object();
  for (int64_t i = 0; i < value; ++i) {
    by_id[cat(i)] = cat("LABEL_", i);
    by_name[cat("LABEL_", i)] = i;
  }
  impl_->json["id2label"] = by_id;
  impl_->json["label2id"] = by_name;
}

int64_t HfFields::num_experts() const {
  constexpr const char* kKeys[] = {"num_local_experts", "num_experts", "n_routed_experts",
                                   "moe_num_experts", "num_routed_experts"};
  const ordered_json* nested = impl_->find("text_config");  // in multimodal models
  for (const ordered_json* object : {static_cast<const ordered_json*>(&impl_->json), nested}) {
    if (object == nullptr || !object->is_object()) continue;
    for (const char* key : kKeys)
      if (const auto found = object->find(key); found != object->end())
        if (found->is_number_integer() && *found > 1) return found->get<int64_t>();
  }
  return 0;
}

std::string HfFields::nested_text(std::string_view key,
                                  std::initializer_list<std::string_view> own) const {
  const ordered_json* found = impl_->find(key);
  if (found == nullptr) absent(name(), key);
  if (!found->is_object()) wrong_type(name(), key, *found, "an object");
  ordered_json nested = *found;
  for (const std::string_view kept : own)
    if (const ordered_json* value = impl_->find(kept); value != nullptr)
      nested[std::string(kept)] = *value;
  return nested.dump(2) + "\n";
}

std::string HfFields::quantization() const {
  const ordered_json* found = impl_->find("quantization_config");
  if (found == nullptr) return "";
  if (!found->is_object()) wrong_type(name(), "quantization_config", *found, "an object");
  if (found->empty()) return "";
  const auto given = found->find("quant_method");
  const std::string method = given != found->end() && given->is_string()
                                 ? given->get<std::string>()
                                 : "a method without a name";
  MEGATRON_CHECK(method == "fp8" || method == "mxfp4", name(), ": the weights are quantised by ",
                 method, " (quantization_config), which is not built",
                 "\nhint: give the model's weights as they were before, in bf16, fp16 or fp32; fp8 "
                 "in blocks and mxfp4 are read");
  if (method != "fp8") return method;
  const ordered_json* blocks = member_of(*found, "weight_block_size");
  MEGATRON_CHECK(blocks != nullptr && *blocks == ordered_json::array({128, 128}), name(),
                 ": weights in fp8 with weight_block_size ",
                 blocks == nullptr ? "null" : short_text(*blocks),
                 " are not built, only [128,128]");
  return method;
}

DType HfFields::dtype() const {
  for (const char* key : {"dtype", "torch_dtype"})
    if (const ordered_json* found = impl_->find(key); found != nullptr && found->is_string())
      for (const DType dtype : {DType::kFloat32, DType::kFloat16})
        if (*found == torch_name(dtype)) return dtype;
  return DType::kBFloat16;
}

void HfFields::erase(std::string_view key) { impl_->json.erase(std::string(key)); }

void HfFields::set(std::string_view key, std::string_view json) {
  impl_->json[std::string(key)] = ordered_json::parse(json);
}

void HfFields::layer_types(std::vector<std::string>& types) {
  if (!reading()) {
    impl_->json["layer_types"] = types;
    return;
  }
  types = texts("layer_types");
}

void HfFields::range(std::string_view key, std::vector<std::string>& limits) {
  const ordered_json infinite = {{"__float__", "Infinity"}};
  if (!reading()) {
    ordered_json& list = impl_->json[std::string(key)] = {0.0, infinite};
    for (size_t i = 0; i < limits.size() && i < 2; ++i)
      list[i] = limits[i] == "inf" ? infinite : ordered_json(std::stod(limits[i]));
    return;
  }
  limits.clear();
  const ordered_json* found = impl_->find(key);
  if (found == nullptr) return;
  if (!found->is_array() || found->size() != 2) wrong_type(name(), key, *found, "two numbers");
  for (const ordered_json& item : *found) {
    if (item != infinite && !item.is_number()) wrong_type(name(), key, *found, "two numbers");
    limits.push_back(item == infinite ? "inf" : ordered_json(item.get<double>()).dump());
  }
  if (limits[0] == "0.0" && limits[1] == "inf") limits.clear();
}

std::vector<std::string> HfFields::texts(std::string_view key) const {
  std::vector<std::string> all;
  const ordered_json* found = impl_->find(key);
  if (found == nullptr) return all;
  if (!found->is_array()) wrong_type(name(), key, *found, "a list of strings");
  for (const ordered_json& item : *found) all.push_back(to_text(name(), key, item));
  return all;
}

namespace {

// The members that each rope_type uses; others would have no effect and are refused.
struct RopeType {
  std::string_view name;
  RopeScaling scaling;
  std::vector<std::string_view> keys;
};

const std::vector<RopeType>& rope_types() {
  static const std::vector<RopeType> types = {
      {"default", RopeScaling::kNone, {}},
      {"linear", RopeScaling::kLinear, {"factor"}},
      {"llama3",
       RopeScaling::kLlama3,
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}},
      {"yarn",
       RopeScaling::kYarn,
       {"factor", "beta_fast", "beta_slow", "truncate", "attention_factor",
        "original_max_position_embeddings"}},
      {"longrope",
       RopeScaling::kLongRope,
       {"factor", "short_factor", "long_factor", "attention_factor",
        "original_max_position_embeddings"}}};
  return types;
}

// The types that multi-latent attention has.
const std::vector<RopeType>& latent_rope_types() {
  static const std::vector<RopeType> types = {
      {"default", RopeScaling::kNone, {}},
      {"yarn",
       RopeScaling::kYarn,
       {"factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
        "original_max_position_embeddings"}}};
  return types;
}

// Reads one object of rotary parameters, of transformers 4 or 5.
class RopeReader {
 public:
  RopeReader(const std::string& name, const ordered_json& values,
             const std::vector<RopeType>& types = rope_types())
      : name_(name), values_(values) {
    std::string type = "default";
    for (const char* key : {"type", "rope_type"})
      if (const ordered_json* found = find(key)) type = to_text(name_, key, *found);
    if (type == "su") type = "longrope";  // its old name
    for (const RopeType& known : types)
      if (known.name == type) type_ = &known;
    MEGATRON_CHECK(type_ != nullptr, name_, ": rotary positions of the type \"", type,
                   "\" are not built", "\nhint: types that are: ", listed(types, &RopeType::name));
    for (const auto& [key, value] : values_.items()) {
      constexpr std::array<std::string_view, 4> kAlways = {"type", "rope_type", "rope_theta",
                                                           "partial_rotary_factor"};
      const bool known =
          std::find(kAlways.begin(), kAlways.end(), key) != kAlways.end() ||
          std::find(type_->keys.begin(), type_->keys.end(), key) != type_->keys.end() ||
          // transformers puts it into objects of every type
          key == "original_max_position_embeddings";
      MEGATRON_CHECK(known || value.is_null(), name_, ": rotary positions of the type \"",
                     type_->name, "\" with ", key, " ", short_text(value), " are not built");
    }
  }

  RopeScaling scaling() const { return type_->scaling; }
  const ordered_json* find(std::string_view key) const { return member_of(values_, key); }
  double number(std::string_view key, std::optional<double> missing = {}) const {
    const ordered_json* found = find(key);
    if (found == nullptr && !missing) absent(name_, cat("rope_parameters.", key));
    return found != nullptr ? to_number(name_, key, *found) : *missing;
  }
  int64_t integer(std::string_view key, int64_t missing) const {
    const ordered_json* found = find(key);
    return found != nullptr ? to_integer(name_, key, *found) : missing;
  }
  std::vector<double> numbers(std::string_view key) const {
    const ordered_json* found = find(key);
    if (found == nullptr) absent(name_, cat("rope_parameters.", key));
    return to_numbers(name_, key, *found);
  }

  void read_scaling(TransformerConfig& c, std::optional<int64_t> original_at_top) const {
    c.rope_scaling_type = scaling();
    if (scaling() == RopeScaling::kNone) return;
    const bool has_original = scaling() != RopeScaling::kLinear;
    if (has_original)
      c.rope_original_max_position_embeddings = original_at_top.value_or(
          integer("original_max_position_embeddings", c.max_position_embeddings));
    const bool is_long = scaling() == RopeScaling::kLongRope;
    const double ratio = static_cast<double>(c.max_position_embeddings) /
                         static_cast<double>(c.rope_original_max_position_embeddings);
    c.rope_scaling_factor = number("factor", is_long ? std::optional<double>(ratio) : std::nullopt);
    if (scaling() == RopeScaling::kLlama3) {
      c.rope_low_freq_factor = number("low_freq_factor");
      c.rope_high_freq_factor = number("high_freq_factor");
    }
    if (scaling() == RopeScaling::kYarn) read_range(c);
    if (is_long) {
      c.longrope_short_factor = numbers("short_factor");
      c.longrope_long_factor = numbers("long_factor");
    }
    if (find("attention_factor") != nullptr) c.rope_attention_factor = number("attention_factor");
  }

  // Of multi-latent attention. Without mscale_all_dim transformers multiplies cosines by
  // 0.1 ln(factor) + 1, whatever mscale says.
  void read_latent_scaling(TransformerConfig& c) const {
    if (scaling() == RopeScaling::kNone) return;
    c.rotary_scaling_factor = number("factor");
    c.rope_original_max_position_embeddings =
        integer("original_max_position_embeddings", c.max_position_embeddings);
    read_range(c);
    const double mscale = number("mscale", 0.0);
    c.mscale_all_dim = number("mscale_all_dim", 0.0);
    MEGATRON_CHECK(mscale != 0.0 || c.mscale_all_dim == 0.0, name_,
                   ": rotary positions with mscale_all_dim ", c.mscale_all_dim,
                   " and without mscale are not built");
    c.mscale = c.mscale_all_dim != 0.0 ? mscale : 1.0;
  }

 private:
  // The range of frequencies that YaRN blends.
  void read_range(TransformerConfig& c) const {
    c.yarn_beta_fast = number("beta_fast", 32.0);
    c.yarn_beta_slow = number("beta_slow", 1.0);
    const ordered_json* truncate = find("truncate");
    c.yarn_correction_range_round_to_int = truncate == nullptr || *truncate == true;
  }

  const std::string& name_;
  const ordered_json& values_;
  const RopeType* type_ = nullptr;
};

void write_range(const TransformerConfig& c, ordered_json& out) {
  out["beta_fast"] = c.yarn_beta_fast;
  out["beta_slow"] = c.yarn_beta_slow;
  if (!c.yarn_correction_range_round_to_int) out["truncate"] = false;
}

ordered_json latent_scaling_json(const TransformerConfig& c) {
  ordered_json out;
  out["rope_type"] = c.stretches_positions() ? "yarn" : "default";
  out["rope_theta"] = c.rotary_base;
  if (!c.stretches_positions()) return out;
  out["factor"] = c.rotary_scaling_factor;
  out["original_max_position_embeddings"] = c.rope_original_max_position_embeddings;
  write_range(c, out);
  out["mscale"] = c.mscale;
  out["mscale_all_dim"] = c.mscale_all_dim;
  return out;
}

ordered_json scaling_json(const TransformerConfig& c) {
  ordered_json out;
  for (const RopeType& type : rope_types())
    if (type.scaling == c.rope_scaling_type) out["rope_type"] = type.name;
  out["rope_theta"] = c.rotary_base;
  if (c.rope_scaling_type == RopeScaling::kNone) return out;
  out["factor"] = c.rope_scaling_factor;
  if (c.rope_scaling_type == RopeScaling::kLinear) return out;
  out["original_max_position_embeddings"] = c.rope_original_max_position_embeddings;
  if (c.rope_scaling_type == RopeScaling::kLlama3) {
    out["low_freq_factor"] = c.rope_low_freq_factor;
    out["high_freq_factor"] = c.rope_high_freq_factor;
  }
  if (c.rope_scaling_type == RopeScaling::kYarn) write_range(c, out);
  if (c.rope_scaling_type == RopeScaling::kLongRope) {
    out["short_factor"] = c.longrope_short_factor;
    out["long_factor"] = c.longrope_long_factor;
  }
  if (c.rope_attention_factor) out["attention_factor"] = *c.rope_attention_factor;
  return out;
}

}  // namespace

namespace {

// Takes mrope_section out of the parameters, and the type that says that there is one.
void take_sections(const std::string& name, ordered_json& parameters, TransformerConfig& config) {
  const ordered_json* sections = member_of(parameters, "mrope_section");
  if (sections == nullptr) absent(name, "rope_parameters.mrope_section");
  MEGATRON_CHECK(sections->is_array(), name, ": mrope_section is no list");
  config.mrope_section.clear();
  for (const ordered_json& section : *sections)
    config.mrope_section.push_back(to_integer(name, "mrope_section", section));
  parameters.erase("mrope_section");
  for (const char* key : {"type", "rope_type"})
    if (parameters.contains(key) && parameters[key] == "mrope") parameters[key] = "default";
}

}  // namespace

void HfFields::rope(TransformerConfig& config, const Rope& rope) {
  ordered_json& json = impl_->json;
  if (!reading()) {
    ordered_json all = rope.latent ? latent_scaling_json(config) : scaling_json(config);
    if (config.rotary_percent != 1.0 || rope.percent != 1.0)
      all["partial_rotary_factor"] = config.rotary_percent;
    if (rope.sections) all["mrope_section"] = config.mrope_section;
    if (const ordered_json* given = impl_->find("rope_parameters"); given && given->is_object())
      for (const std::string_view key : rope.without_effect)
        if (given->contains(key)) all[std::string(key)] = (*given)[std::string(key)];
    for (const char* key : {rope.legacy_theta, rope.legacy_percent, "rope_theta", "rope_scaling",
                            rope.legacy_local_theta})
      json.erase(key);
    if (rope.local_theta) {
      const double local = config.rotary_base_local.value_or(config.rotary_base);
      json["rope_parameters"] = {
          {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", local}}},
          {"full_attention", all}};
    } else {
      json["rope_parameters"] = all;
    }
    if (rope.original_length)
      json["original_max_position_embeddings"] = config.rope_scaling_type == RopeScaling::kLongRope
                                                     ? config.rope_original_max_position_embeddings
                                                     : config.max_position_embeddings;
    return;
  }
  config.position_embedding_type = PositionEmbedding::kRope;
  // Keys of transformers 4, overridden by those of 5.
  ordered_json all = ordered_json::object(), local = ordered_json::object();
  const auto take = [&](ordered_json& into, const char* key, const ordered_json* from) {
    if (from == nullptr) return;
    if (!from->is_object()) wrong_type(name(), key, *from, "an object");
    for (const auto& [member, value] : from->items()) into[member] = value;
  };
  if (const ordered_json* theta = impl_->find(rope.legacy_theta)) all["rope_theta"] = *theta;
  if (const ordered_json* percent = impl_->find(rope.legacy_percent))
    all["partial_rotary_factor"] = *percent;
  if (const ordered_json* theta = impl_->find(rope.legacy_local_theta))
    local["rope_theta"] = *theta;
  take(all, "rope_scaling", impl_->find("rope_scaling"));
  if (const ordered_json* given = impl_->find("rope_parameters")) {
    const bool nested = given->is_object() &&
                        (given->contains("full_attention") || given->contains("sliding_attention"));
    MEGATRON_CHECK(!nested || rope.local_theta, name(),
                   ": rope_parameters of each type of layer are not built for this model");
    if (nested) {
      if (given->contains("full_attention"))
        take(all, "rope_parameters", &(*given)["full_attention"]);
      if (given->contains("sliding_attention"))
        take(local, "rope_parameters", &(*given)["sliding_attention"]);
    } else {
      take(all, "rope_parameters", given);
    }
  }
  for (const std::string_view key : rope.without_effect) all.erase(std::string(key));
  if (rope.sections) take_sections(name(), all, config);
  const RopeReader reader(name(), all, rope.latent ? latent_rope_types() : rope_types());
  config.rotary_base = reader.number("rope_theta", rope.theta);
  config.rotary_percent = reader.number("partial_rotary_factor", rope.percent);
  if (rope.latent) return reader.read_latent_scaling(config);
  std::optional<int64_t> original;
  if (rope.original_length)
    original = find_integer("original_max_position_embeddings").value_or(*rope.original_length);
  reader.read_scaling(config, original);
  if (!rope.local_theta) return;
  const RopeReader local_reader(name(), local);
  MEGATRON_CHECK(local_reader.scaling() == RopeScaling::kNone, name(),
                 ": scaled rotary positions of sliding layers are not built");
  config.rotary_base_local = local_reader.number("rope_theta", *rope.local_theta);
}

}  // namespace megatron
