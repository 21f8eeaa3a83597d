#include "megatron/training/run_state.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/format.h"

namespace megatron {

using nlohmann::ordered_json;

namespace {

constexpr size_t kLongest = 120;

std::string dumped(const ordered_json& value) {
  const std::string text = value.dump();
  return text.size() > kLongest ? text.substr(0, kLongest) + "..." : text;
}

// Appends "KEY is VALUE, was VALUE" of each key that differs, in objects and in long arrays.
void find_differences(const ordered_json& now, const ordered_json& stored, const std::string& path,
                      std::vector<std::string>& found) {
  if (now == stored) return;
  if (now.is_object() && stored.is_object()) {
    const std::string prefix = path.empty() ? "" : path + ".";
    for (const auto& [key, value] : now.items()) {
      if (stored.contains(key))
        find_differences(value, stored[key], prefix + key, found);
      else
        found.push_back(cat(prefix, key, " is ", dumped(value), ", was absent"));
    }
    for (const auto& [key, value] : stored.items())
      if (!now.contains(key)) found.push_back(cat(prefix, key, " is absent, was ", dumped(value)));
  } else if (now.is_array() && stored.is_array() && now.size() == stored.size() &&
             std::max(now.dump().size(), stored.dump().size()) > kLongest) {
    for (size_t i = 0; i < now.size(); ++i)
      find_differences(now[i], stored[i], cat(path, "[", i, "]"), found);
  } else if (now.is_object() && stored.is_string()) {
    found.push_back(cat(path, " differs from what the checkpoint, of a version before, has only ",
                        "as the hash ", dumped(stored)));
  } else {
    found.push_back(cat(path, " is ", dumped(now), ", was ", dumped(stored)));
  }
}

}  // namespace

std::string run_state_to_json(const RunState& state) {
  ordered_json json;
  json["iteration"] = state.iteration;
  json["consumed_train_samples"] = state.consumed_train_samples;
  json["consumed_valid_samples"] = state.consumed_valid_samples;
  json["task"] = state.task;
  json["tokenizer_fingerprint"] = state.tokenizer_fingerprint;
  json["data"]["target_samples"] = state.data_target;
  json["data"]["fingerprint"] = state.data_fingerprint;
  if (!state.data_description.empty())
    json["data"]["description"] = ordered_json::parse(state.data_description);
  if (state.step) json["optimizer"] = ordered_json::parse(step_state_to_json(*state.step));
  if (state.schedule)
    json["opt_param_scheduler"] = ordered_json::parse(schedule_to_json(*state.schedule));
  return json.dump();
}

RunState run_state_from_json(const std::string& text, const std::string& name) {
  RunState state;
  try {
    const ordered_json json = ordered_json::parse(text);
    json.at("iteration").get_to(state.iteration);
    json.at("consumed_train_samples").get_to(state.consumed_train_samples);
    json.at("consumed_valid_samples").get_to(state.consumed_valid_samples);
    json.at("task").get_to(state.task);
    json.at("tokenizer_fingerprint").get_to(state.tokenizer_fingerprint);
    json.at("data").at("target_samples").get_to(state.data_target);
    json.at("data").at("fingerprint").get_to(state.data_fingerprint);
    if (json["data"].contains("description"))
      state.data_description = json["data"]["description"].dump();
    if (json.contains("optimizer")) state.step = step_state_from_json(json["optimizer"].dump());
    if (json.contains("opt_param_scheduler"))
      state.schedule = schedule_from_json(json["opt_param_scheduler"].dump());
  } catch (const nlohmann::json::exception& error) {
    throw Error(cat(name, ": the state of the run cannot be read: ", error.what(),
                    "\nhint: only the weights of such a checkpoint can be used; give --finetune"));
  }
  return state;
}

std::string describe_difference(const std::string& now, const std::string& stored) {
  const ordered_json a = ordered_json::parse(now, nullptr, false),
                     b = ordered_json::parse(stored, nullptr, false);
  if (!a.is_object() || !b.is_object()) return "the descriptions cannot be compared";
  std::vector<std::string> found;
  find_differences(a, b, "", found);
  if (found.empty()) return "no value differs, only how a file that says them is written";
  return listed(found, {}, "; ");
}

}  // namespace megatron
