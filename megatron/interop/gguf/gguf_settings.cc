#include "megatron/interop/gguf/gguf_settings.h"

#include <charconv>
#include <cmath>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr uint64_t kMostLayers = 1 << 14;

double shortest(double value) {
  const auto narrow = static_cast<float>(value);
  return static_cast<double>(narrow) == value ? shortest_number(narrow) : value;
}

}  // namespace

double shortest_number(float value) {
  char text[64];
  const auto end = std::to_chars(text, text + sizeof text, value).ptr;
  double exact = static_cast<double>(value);
  std::from_chars(text, end, exact);
  return exact;
}

GgufSettings::GgufSettings(const GgufFile& file, std::string architecture)
    : file_(file), architecture_(std::move(architecture)) {}

std::string GgufSettings::full(std::string_view key) const { return cat(architecture_, ".", key); }

std::optional<int64_t> GgufSettings::find_integer(std::string_view key) {
  const std::string name = full(key);
  used_.insert(name);
  const auto found = file_.keys().find(name);
  if (found == file_.keys().end() || !found->second.is_array) return file_.integer(name);
  const std::vector<int64_t> layers = *file_.integers(name, kMostLayers);
  for (const int64_t value : layers)
    MEGATRON_CHECK(value == layers[0], file_.place(name),
                   ": differs between layers, which is not built");
  MEGATRON_CHECK(!layers.empty(), file_.place(name), ": is empty");
  return layers[0];
}

int64_t GgufSettings::integer(std::string_view key, std::optional<int64_t> missing) {
  std::optional<int64_t> found = find_integer(key);
  if (!found) found = missing;
  MEGATRON_CHECK(found.has_value(), file_.place(full(key)), ": is not there");
  return *found;
}

std::optional<double> GgufSettings::find_number(std::string_view key) {
  const std::string name = full(key);
  used_.insert(name);
  const std::optional<double> found = file_.number(name);
  return found ? std::optional(shortest(*found)) : std::nullopt;
}

double GgufSettings::number(std::string_view key, std::optional<double> missing) {
  std::optional<double> found = find_number(key);
  if (!found) found = missing;
  MEGATRON_CHECK(found.has_value(), file_.place(full(key)), ": is not there");
  return *found;
}

std::optional<bool> GgufSettings::find_boolean(std::string_view key) {
  const std::string name = full(key);
  used_.insert(name);
  return file_.boolean(name);
}

std::optional<std::string> GgufSettings::find_text(std::string_view key) {
  const std::string name = full(key);
  used_.insert(name);
  return file_.text(name);
}

std::optional<std::vector<int64_t>> GgufSettings::find_layers(std::string_view key) {
  const std::string name = full(key);
  used_.insert(name);
  const auto found = file_.keys().find(name);
  if (found == file_.keys().end() || !found->second.is_array) return std::nullopt;
  return file_.integers(name, kMostLayers);
}

void GgufSettings::expect(std::string_view key, int64_t value) {
  const std::optional<int64_t> found = find_integer(key);
  MEGATRON_CHECK(!found || *found == value, file_.place(full(key)), ": is ", found.value_or(0),
                 ", only ", value, " is built");
}

void GgufSettings::expect(std::string_view key, bool value) {
  const std::optional<bool> found = find_boolean(key);
  MEGATRON_CHECK(!found || *found == value, file_.place(full(key)), ": is ",
                 value ? "false" : "true", ", only ", value ? "true" : "false", " is built");
}

void GgufSettings::expect_number(std::string_view key, double value) {
  const std::optional<double> found = find_number(key);
  MEGATRON_CHECK(!found || *found == value, file_.place(full(key)), ": is ", found.value_or(0),
                 ", only ", value, " is built");
}

void GgufSettings::refuse(std::string_view key, std::string_view why) {
  const std::string name = full(key);
  MEGATRON_CHECK(!file_.keys().contains(name), file_.place(name), ": ", why);
}

void GgufSettings::finish() const {
  const std::string prefix = architecture_ + ".";
  for (auto key = file_.keys().lower_bound(prefix);
       key != file_.keys().end() && key->first.starts_with(prefix); ++key)
    MEGATRON_CHECK(used_.contains(key->first), file_.place(key->first),
                   ": this setting is not built for the architecture ", architecture_);
}

}  // namespace megatron
