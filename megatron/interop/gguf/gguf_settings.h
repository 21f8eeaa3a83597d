// The settings of a GGUF file's model, keys like "llama.block_count", as the text of a config.json
// of Hugging Face. Every key of the architecture is used, or refused by name.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "megatron/base/json_writer.h"
#include "megatron/dist_checkpointing/foreign/gguf_file.h"

namespace megatron {

// The number whose decimal form is the shortest one that reads as `value`: 1e-5, not 9.99999974e-6.
double shortest_number(float value);

class GgufSettings {
 public:
  GgufSettings(const GgufFile& file, std::string architecture);

  const GgufFile& file() const { return file_; }
  // The object that is being written.
  JsonWriter& json() { return json_; }

  // Values of "<architecture>.<key>", which counts as used. One that is absent is an error, unless
  // `missing` is given or the name begins with find.
  int64_t integer(std::string_view key, std::optional<int64_t> missing = {});
  std::optional<int64_t> find_integer(std::string_view key);
  // Of a float its shortest_number().
  double number(std::string_view key, std::optional<double> missing = {});
  std::optional<double> find_number(std::string_view key);
  std::optional<bool> find_boolean(std::string_view key);
  std::optional<std::string> find_text(std::string_view key);
  // An array of one element per layer, numbers or booleans.
  std::optional<std::vector<int64_t>> find_layers(std::string_view key);

  // Refuses another value, if the key is there.
  void expect(std::string_view key, int64_t value);
  void expect(std::string_view key, bool value);
  void expect_number(std::string_view key, double value);
  // Refuses a key that is there.
  void refuse(std::string_view key, std::string_view why);

  // Throws Error for the first key of the architecture that nothing asked for.
  void finish() const;

  std::string full(std::string_view key) const;

 private:
  const GgufFile& file_;
  std::string architecture_;
  std::set<std::string, std::less<>> used_;
  JsonWriter json_{2};
};

}  // namespace megatron
