// Reads or writes a Hugging Face config.json by one list of keys per family.
//
// Reads the keys of transformers 4 (rope_theta, rope_scaling, torch_dtype) and of transformers 5
// (rope_parameters, dtype); writes those of 5.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/dtype.h"
#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

class HfFields {
 public:
  // Reads a config.json; `name` is used in errors. Throws Error with line and column for text that
  // is not a JSON object.
  HfFields(const std::string& text, std::string name);
  // Writes one on top of `base`, the text of another one (its other keys are kept) or "{}".
  static HfFields writer(const std::string& base);
  HfFields(HfFields&&) noexcept;
  ~HfFields();

  bool reading() const;
  const std::string& name() const;  // for errors
  std::string text() const;         // what was written

  // Each reads `value` from the key or writes it there. A key that is absent or null reads as
  // `missing`; without a `missing` that is an error, as is a value of another type.
  void integer(std::string_view key, int64_t& value, std::optional<int64_t> missing = {});
  void number(std::string_view key, double& value, std::optional<double> missing = {});
  void flag(std::string_view key, bool& value, std::optional<bool> missing = {});
  void text(std::string_view key, std::string& value, std::optional<std::string> missing = {});
  // Null and 0 are the same. Absent reads as `missing`.
  void number_or_null(std::string_view key, double& value, double missing);
  void integer_or_null(std::string_view key, std::optional<int64_t>& value,
                       std::optional<int64_t> missing);

  // An integer that may be negative.
  void signed_integer(std::string_view key, int64_t& value, std::optional<int64_t> missing = {});

  // Height and width: one number for both, or a list of two. A list is written.
  void sides(std::string_view key, int64_t& height, int64_t& width, int64_t missing);

  // A list; absent and null read as `missing`.
  void integers(std::string_view key, std::vector<int64_t>& values,
                const std::vector<int64_t>& missing = {});

  // Reading: a key that is neither among these nor one of those of every configuration that say
  // nothing of the layers is an error that names it.
  void only(std::span<const std::string_view> known) const;

  // Two numbers, the least and the largest, as texts, "inf" for an infinite one; empty: 0 and inf,
  // which absent and null mean. An infinite one is {"__float__": "Infinity"} (transformers 5) in
  // the file, or a bare Infinity (4).
  void range(std::string_view key, std::vector<std::string>& limits);

  // The JSON text of a member that is an object, "{}" if it is absent or null.
  std::string part(std::string_view key) const;

  // Reading: a list of strings; absent and null are an empty one.
  std::vector<std::string> texts(std::string_view key) const;

  // The family supports only this value (JSON text) of the key; absent and null mean it. Another
  // value is an error that names the key.
  void constant(std::string_view key, std::string_view json);

  // Rotary positions. Needs max_position_embeddings in `config`.
  struct Rope {
    double theta = 10000.0;                   // default
    double percent = 1.0;                     // default of partial_rotary_factor
    const char* legacy_theta = "rope_theta";  // key of transformers 4
    const char* legacy_percent = "partial_rotary_factor";
    std::optional<double> local_theta = {};  // base of windowed layers (Gemma 3)
    const char* legacy_local_theta = "rope_local_base_freq";
    // original_max_position_embeddings is a top-level key (Phi-3)
    std::optional<int64_t> original_length = {};
    // Members that mean nothing for a text without pictures; writing keeps those of the base
    std::vector<std::string_view> without_effect = {};
    // Of multi-latent attention: default or yarn, with mscale and mscale_all_dim (DeepSeek)
    bool latent = false;
    bool sections = false;  // mrope_section (Qwen 2-VL), of the type "mrope" or "default"
  };
  void rope(TransformerConfig& config, const Rope& rope);

  // Kind of each layer in order ("sliding_attention", "full_attention"); empty: absent.
  void layer_types(std::vector<std::string>& types);

  // Whether the key is this text, in what is read or written over.
  bool is_text(std::string_view key, std::string_view value) const;
  // Reading: an integer, or nothing when absent or null.
  std::optional<int64_t> find_integer(std::string_view key) const;
  // The number of classes, the size of id2label; 2 without it and num_labels. Writing keeps the
  // names of as many classes.
  void num_labels(int64_t& value);
  // Reading: the number of experts, by any of its keys; 0: not a mixture of experts.
  int64_t num_experts() const;
  // The object under a key as text, over it this one's values of the keys in `own`.
  std::string nested_text(std::string_view key, std::initializer_list<std::string_view> own) const;
  // Reading: quant_method of quantization_config, "fp8" or "mxfp4"; empty: weights are not
  // quantised. Throws Error for other methods, and for blocks of fp8 other than 128 x 128.
  std::string quantization() const;
  // Reading: dtype, or torch_dtype; bf16 without either.
  DType dtype() const;
  // Writing: removes a key.
  void erase(std::string_view key);
  // Writing: a key with JSON text as its value.
  void set(std::string_view key, std::string_view json);

 private:
  struct Impl;
  explicit HfFields(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace megatron
