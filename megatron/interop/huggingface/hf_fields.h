// A config.json of Hugging Face as a family describes it: one list of keys, read or written.
//
// Both dialects are read, that of transformers 4 (rope_theta, rope_scaling, torch_dtype) and that
// of 5 (rope_parameters, dtype); the newer one is written.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/transformer/config/transformer_config.h"

namespace megatron {

class HfFields {
 public:
  // To read a config.json; `name` is used in errors. Throws Error for text that is no JSON object,
  // with line and column.
  HfFields(const std::string& text, std::string name);
  // To write one over `base`, the text of another (keys that nobody writes stay) or "{}".
  static HfFields writer(const std::string& base);
  HfFields(HfFields&&) noexcept;
  ~HfFields();

  bool reading() const;
  const std::string& name() const;  // for errors
  std::string text() const;         // what was written

  // Each reads `value` from the key or writes it there. A key that is absent or null reads as
  // `missing`; without one that is an error, as is a value of another type.
  void integer(std::string_view key, int64_t& value, std::optional<int64_t> missing = {});
  void number(std::string_view key, double& value, std::optional<double> missing = {});
  void flag(std::string_view key, bool& value, std::optional<bool> missing = {});
  void text(std::string_view key, std::string& value, std::optional<std::string> missing = {});
  // Null and 0 are the same. Absent reads as `missing`.
  void number_or_null(std::string_view key, double& value, double missing);
  void integer_or_null(std::string_view key, std::optional<int64_t>& value,
                       std::optional<int64_t> missing);

  // The family knows only this value (JSON text) of the key; absent and null mean it. Another is an
  // error that names it.
  void constant(std::string_view key, std::string_view json);

  // Rotary positions. Needs max_position_embeddings in `config`.
  struct Rope {
    double theta = 10000.0;                   // when absent
    double percent = 1.0;                     // partial_rotary_factor when absent
    const char* legacy_theta = "rope_theta";  // keys of the older dialect
    const char* legacy_percent = "partial_rotary_factor";
    std::optional<double> local_theta = {};  // windowed layers have their own (Gemma 3)
    std::optional<int64_t> original_length =
        {};  // a key original_max_position_embeddings at the top decides (Phi-3)
  };
  void rope(TransformerConfig& config, const Rope& rope);

  // The names of layers in the order of the layers ("sliding_attention", "full_attention"); empty:
  // absent.
  void layer_types(std::vector<std::string>& types);

  // Reading: an integer, or nothing when absent or null.
  std::optional<int64_t> find_integer(std::string_view key) const;
  // Reading: the number of experts of a mixture, by any of the names that it goes by; 0: it is
  // none.
  int64_t num_experts() const;
  // Reading: how quantization_config says that the weights are stored ("gptq"); empty: as they are.
  std::string quantization_method() const;
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
