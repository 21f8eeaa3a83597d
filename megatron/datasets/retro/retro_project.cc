#include "megatron/datasets/retro/retro_project.h"

#include <nlohmann/json.hpp>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/datasets/retro/rank_share.h"

namespace megatron {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "megatron retro project";
constexpr int kVersion = 1;

// "/data_sets/0/index_hash" -> "data_sets[0].index_hash"
std::string member_path(const std::string& pointer) {
  std::string out;
  for (const std::string& part : split(pointer, '/'))
    out += part.find_first_not_of("0123456789") == std::string::npos
               ? cat("[", part, "]")
               : (out.empty() ? "" : ".") + part;
  return out;
}

}  // namespace

std::string json_differences(const json& there, const json& here) {
  const json old = there.flatten(), now = here.flatten();
  std::vector<std::string> found;
  for (const auto& [path, value] : old.items()) {
    if (!now.contains(path))
      found.push_back(cat(member_path(path), " is ", value.dump(), ", here there is none"));
    else if (now[path] != value)
      found.push_back(cat(member_path(path), " is ", value.dump(), ", here ", now[path].dump()));
  }
  for (const auto& [path, value] : now.items())
    if (!old.contains(path))
      found.push_back(cat("there is no ", member_path(path), ", here it is ", value.dump()));
  return listed(found, {}, "; ");
}

RetroProject::RetroProject(std::filesystem::path folder, bool writes_manifest)
    : folder_(std::move(folder)), writes_manifest_(writes_manifest) {
  read();
}

void RetroProject::read() {
  text_ = json{{"format", kFormat}, {"version", kVersion}}.dump();
  if (!std::filesystem::exists(manifest())) return;
  const json stored = json::parse(read_file(manifest()), nullptr, /*allow_exceptions=*/false);
  MEGATRON_CHECK(stored.is_object() && stored.value("format", "") == kFormat, manifest().string(),
                 " is not the manifest of a retrieval project");
  const json version = stored.value("version", json());
  MEGATRON_CHECK(version == kVersion, manifest().string(), " has version ", version.dump(),
                 ", this program reads version ", kVersion);
  const auto object = [&](const char* name) {
    const json part = stored.value(name, json::object());
    return part.is_object();
  };
  MEGATRON_CHECK(object("facts") && object("done"), manifest().string(),
                 ": \"facts\" or \"done\" is no object");
  text_ = stored.dump();
}

void RetroProject::write() const {
  std::filesystem::create_directories(folder_);
  write_file_atomically(manifest(), json::parse(text_).dump(1) + "\n");
}

void RetroProject::agree(const json& facts) {
  const auto all_known = [&] {
    read();
    const json known = json::parse(text_).value("facts", json::object());
    for (const auto& [name, value] : facts.items())
      if (!known.contains(name)) return false;
    return true;
  };
  if (!writes_manifest_) wait_until(all_known);
  json all = json::parse(text_);
  json& known = all["facts"];
  std::string differences;
  for (const auto& [name, value] : facts.items()) {
    if (!known.contains(name)) continue;
    const std::string found = json_differences(json{{name, known[name]}}, json{{name, value}});
    if (!found.empty()) differences += (differences.empty() ? "" : "; ") + found;
  }
  MEGATRON_CHECK(differences.empty(), manifest().string(),
                 ": the project is of another run: ", differences,
                 "\nhint: another --retro-project-dir, or the flags of that run");
  bool more = false;
  for (const auto& [name, value] : facts.items()) {
    if (known.contains(name)) continue;
    known[name] = value;
    more = true;
  }
  if (!more) return;
  text_ = all.dump();
  write();
}

json RetroProject::fact(const std::string& name) const {
  const json all = json::parse(text_);
  const json facts = all.value("facts", json::object());
  MEGATRON_CHECK(facts.contains(name), manifest().string(), " does not say ", name,
                 "\nhint: megatron retro makes a project");
  return facts[name];
}

std::optional<json> RetroProject::done(const std::string& step) const {
  const json all = json::parse(text_);
  const json steps = all.value("done", json::object());
  if (!steps.contains(step)) return std::nullopt;
  return steps[step];
}

json RetroProject::require(const std::string& step) const {
  const auto counts = done(step);
  MEGATRON_CHECK(counts, folder_.string(), ": the step ", step, " is not done",
                 "\nhint: megatron retro --retro-tasks ", step, " with the same flags");
  return *counts;
}

void RetroProject::wait_for(const std::string& step) {
  wait_until([&] {
    read();
    return done(step).has_value();
  });
}

void RetroProject::mark_done(const std::string& step, const json& counts) {
  json all = json::parse(text_);
  all["done"][step] = counts;
  text_ = all.dump();
  write();
}

}  // namespace megatron
