#include "megatron/training/run_state.h"

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"

namespace megatron {

using nlohmann::ordered_json;

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
  std::string out;
  const auto add = [&](const std::string& key, const std::string& is, const std::string& was) {
    constexpr size_t kLongest = 120;
    const auto cut = [](std::string text) {
      return text.size() > kLongest ? text.substr(0, kLongest) + "..." : text;
    };
    out += cat(out.empty() ? "" : "; ", key, " is ", cut(is), ", was ", cut(was));
  };
  for (const auto& [key, value] : a.items()) {
    if (!b.contains(key)) {
      add(key, value.dump(), "absent");
    } else if (b[key] != value) {
      add(key, value.dump(), b[key].dump());
    }
  }
  for (const auto& [key, value] : b.items())
    if (!a.contains(key)) add(key, "absent", value.dump());
  return out;
}

}  // namespace megatron
