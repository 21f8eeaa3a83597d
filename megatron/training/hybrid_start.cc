#include "megatron/training/hybrid_start.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/parse.h"
#include "megatron/dist_checkpointing/checkpoint.h"

namespace megatron {
namespace {

constexpr std::string_view kLayers = "decoder.layers.", kFinalNorm = "decoder.final_norm.",
                           kFinalLayerNorm = "decoder.final_layernorm.";

// Where the number of a tensor's layer, which counts from 0, stands in its name.
struct LayerNumber {
  size_t begin, end;
  int64_t layer;
};

std::optional<LayerNumber> layer_number(std::string_view name) {
  const size_t at = name.find(kLayers);
  if (at == std::string_view::npos) return {};
  LayerNumber number{at + kLayers.size(), 0, 0};
  const auto [end, error] =
      std::from_chars(name.data() + number.begin, name.data() + name.size(), number.layer);
  if (error != std::errc()) return {};
  number.end = static_cast<size_t>(end - name.data());
  return number;
}

// The pattern that config.yaml of the checkpoint holds; empty: it has none.
std::string stored_letters(const Checkpoint& checkpoint) {
  const std::filesystem::path stored = checkpoint.directory() / "config.yaml";
  if (!std::filesystem::exists(stored)) return {};
  TransformerConfig config;
  Config* const configs[] = {&config};
  read_yaml(configs, stored.string(), /*ignore_unknown=*/true);
  return config.hybrid_letters();
}

void check_letters(const std::string& folder, const std::string& stored,
                   const std::string& letters) {
  if (stored.empty() || stored == letters) return;
  const size_t at =
      static_cast<size_t>(std::ranges::mismatch(stored, letters).in1 - stored.begin());
  const auto letter = [&](const std::string& of) {
    return at < of.size() ? cat("'", of.substr(at, 1), "'") : std::string("no layer");
  };
  throw Error(cat(folder, " is of the layers ", stored, ", the run has ",
                  letters.empty() ? "no --hybrid-layer-pattern" : letters, ": at position ", at + 1,
                  " ", letter(stored), " and ", letter(letters), "\nhint: --hybrid-layer-pattern ",
                  stored));
}

bool is_attention(char letter) { return letter == '*' || letter == '+'; }
bool is_feed_forward(char letter) { return letter == '-' || letter == 'E'; }

}  // namespace

void read_as_letters(const Checkpoint& checkpoint, const TransformerConfig& config,
                     std::vector<StateTensor>& tensors) {
  const std::string folder = checkpoint.directory().string(), letters = config.hybrid_letters();
  check_letters(folder, stored_letters(checkpoint), letters);
  const auto& held = checkpoint.manifest().tensors;
  const auto of_gpt = [](const auto& item) { return item.first.starts_with(kFinalLayerNorm); };
  if (letters.empty() || std::ranges::none_of(held, of_gpt)) return;
  int64_t layers = 0;
  for (const auto& [name, tensor] : held)
    if (const auto number = layer_number(name)) layers = std::max(layers, number->layer + 1);
  const int64_t attention = std::ranges::count_if(letters, is_attention),
                feed_forward = std::ranges::count_if(letters, is_feed_forward);
  MEGATRON_CHECK(attention == layers && feed_forward == layers, folder, " is of a GPT of ", layers,
                 " layers, but --hybrid-layer-pattern ", letters, " has ", attention,
                 " layers of attention and ", feed_forward, " of MLPs or experts\nhint: ", layers,
                 " of each, in any order");
  for (StateTensor& tensor : tensors) {
    std::string& key = tensor.description.key;
    if (const size_t at = key.find(kFinalNorm); at != std::string::npos)
      key.replace(at, kFinalNorm.size(), kFinalLayerNorm);
    const std::optional<LayerNumber> number = layer_number(key);
    if (!number) continue;
    const std::string_view before =
        std::string_view(letters).substr(0, static_cast<size_t>(number->layer));
    const auto same = is_attention(letters[before.size()]) ? is_attention : is_feed_forward;
    key.replace(number->begin, number->end - number->begin,
                cat(std::ranges::count_if(before, same)));
  }
}

}  // namespace megatron
