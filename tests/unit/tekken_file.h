// A small tekken.json, as tests/golden/tokenizers/make_tekken.py gave it to mistral-common.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "megatron/base/files.h"

namespace megatron {

inline nlohmann::json tekken_golden() {
  return nlohmann::json::parse(
      read_file(MEGATRON_SOURCE_DIR "/tests/golden/tokenizers/tekken.golden.json"));
}

inline nlohmann::json tekken_file() {
  using Json = nlohmann::json;
  const Json golden = tekken_golden();
  const int64_t special = golden["count"];
  Json tokens = golden["merges"], vocab = Json::array(), names = Json::array();
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const auto add = [&](const std::string& base64) {
    vocab.push_back({{"rank", vocab.size()}, {"token_bytes", base64}, {"token_str", nullptr}});
  };
  for (size_t byte = 0; byte < 256; ++byte)
    add({kDigits[byte / 4], kDigits[byte % 4 * 16], '=', '='});
  for (const Json& token : tokens) add(token);
  add("YmV5b25k");  // beyond the size
  for (const Json& name : golden["specials"])
    names.push_back({{"rank", names.size()}, {"token_str", name}, {"is_control", true}});
  return {{"config",
           {{"pattern", golden["pattern"]},
            {"num_vocab_tokens", vocab.size()},
            {"default_vocab_size", special + 256 + tokens.size()},
            {"default_num_special_tokens", special},
            {"version", "v7"}}},
          {"vocab", vocab},
          {"special_tokens", names},
          {"audio", {{"sampling_rate", 16000}, {"frame_rate", 12.5}}}};
}

// [id, n] stands for n of them.
inline std::vector<int32_t> golden_ids(const nlohmann::json& ids) {
  std::vector<int32_t> out;
  for (const nlohmann::json& id : ids)
    out.insert(out.end(), id.is_array() ? id[1].get<size_t>() : 1,
               id.is_array() ? id[0].get<int32_t>() : id.get<int32_t>());
  return out;
}

}  // namespace megatron
