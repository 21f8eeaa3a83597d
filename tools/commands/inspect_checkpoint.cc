// megatron inspect-checkpoint DIR: contents of a checkpoint, or the checkpoints of a folder.
#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/leftovers.h"
#include "megatron/dist_checkpointing/verify.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

struct InspectCheckpointConfig : Config {
  std::string directory;
  bool verify = false;
  bool json = false;
  bool sweep = false;

  void fields(FieldVisitor& visitor) override {
    visitor.group("inspect-checkpoint");
    visitor.field({"directory", "--load --directory"}, directory,
                  "a checkpoint (iter_0000100), or a folder of checkpoints");
    visitor.field("verify", verify, "read every byte and compare the checksums");
    visitor.field("json", json, "print JSON");
    visitor.field("sweep", sweep,
                  "remove unfinished writes (*.tmp-*) whose writers are gone and directories that "
                  "were set aside (*.unusable-*)");
  }
  void validate(Violations& violations) const override {
    if (directory.empty())
      violations.add("inspect-checkpoint needs a folder",
                     "megatron inspect-checkpoint RUN_DIR/iter_0000100");
  }
};

using Rows = std::vector<std::vector<std::string>>;

// `right`: the columns of numbers.
void print_rows(const Rows& rows, std::initializer_list<size_t> right) {
  const auto is_right = [&](size_t column) {
    return std::find(right.begin(), right.end(), column) != right.end();
  };
  for (const std::string& line : format_table(rows, is_right)) print_line(line);
}

uint64_t num_bytes(const StoredTensor& tensor) {
  auto bytes = static_cast<uint64_t>(size_of(tensor.dtype));
  for (const int64_t extent : tensor.shape) bytes *= static_cast<uint64_t>(extent);
  return bytes;
}

// The names of the files that hold parts of a tensor.
std::vector<std::string> files_of(const Manifest& manifest, const StoredTensor& tensor) {
  std::set<std::string> names;
  for (const Fragment& fragment : tensor.fragments)
    names.insert(manifest.files[static_cast<size_t>(fragment.file)].name);
  return {names.begin(), names.end()};
}

uint64_t total_bytes(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const StoredFile& file : manifest.files) bytes += file.bytes;
  return bytes;
}

uint64_t tensor_bytes(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const auto& [key, tensor] : manifest.tensors) bytes += num_bytes(tensor);
  return bytes;
}

ordered_json as_json(const Checkpoint& checkpoint) {
  const Manifest& manifest = checkpoint.manifest();
  ordered_json tensors = ordered_json::object(), files = ordered_json::array();
  for (const auto& [key, tensor] : manifest.tensors)
    tensors[key] = {{"dtype", to_string(tensor.dtype)},
                    {"shape", tensor.shape},
                    {"bytes", num_bytes(tensor)},
                    {"fragments", tensor.fragments.size()},
                    {"files", files_of(manifest, tensor)}};
  for (const StoredFile& file : manifest.files)
    files.push_back({{"name", file.name}, {"bytes", file.bytes}});
  return {{"directory", checkpoint.directory().string()},
          {"iteration", manifest.iteration},
          {"created", manifest.created},
          {"format_version", kCheckpointFormatVersion},
          {"num_tensors", manifest.tensors.size()},
          {"tensor_bytes", tensor_bytes(manifest)},
          {"file_bytes", total_bytes(manifest)},
          {"state", ordered_json::parse(manifest.state)},
          {"files", files},
          {"tensors", tensors}};
}

void print_checkpoint(const Checkpoint& checkpoint) {
  const Manifest& manifest = checkpoint.manifest();
  Rows head = {{"checkpoint", checkpoint.directory().string()},
               {"iteration", std::to_string(manifest.iteration)},
               {"written", manifest.created},
               {"tensors", cat(format_count(manifest.tensors.size()), ", ",
                               format_bytes(static_cast<double>(tensor_bytes(manifest))))},
               {"files", cat(format_count(manifest.files.size()), ", ",
                             format_bytes(static_cast<double>(total_bytes(manifest))))}};
  const ordered_json state = ordered_json::parse(manifest.state);
  for (const auto& [key, value] : state.items()) head.push_back({"state." + key, value.dump()});
  print_rows(head, {});
  print_line("");
  Rows tensors = {{"tensor", "type", "shape", "bytes", "parts", "files"}};
  for (const auto& [key, tensor] : manifest.tensors) {
    const std::vector<std::string> files = files_of(manifest, tensor);
    std::string names = files.empty() ? "-" : files[0];
    if (files.size() > 1) names += cat(" and ", files.size() - 1, " more");
    tensors.push_back({key, std::string(to_string(tensor.dtype)), format_shape(tensor.shape),
                       format_count(num_bytes(tensor)), std::to_string(tensor.fragments.size()),
                       names});
  }
  print_rows(tensors, {3, 4});
  print_line("");
  Rows files = {{"file", "bytes"}};
  for (const StoredFile& file : manifest.files)
    files.push_back({file.name, format_count(file.bytes)});
  print_rows(files, {1});
}

int inspect_one(const fs::path& directory, const InspectCheckpointConfig& config) {
  const std::vector<std::string> problems =
      config.verify ? verify_checkpoint(directory) : std::vector<std::string>();
  if (!problems.empty()) {
    if (config.json) {
      print_line(ordered_json{
          {"directory", directory.string()}, {"verified", false}, {"problems", problems}}
                     .dump(2));
      return 1;
    }
    std::string text = problems[0];
    for (size_t i = 1; i < problems.size(); ++i)
      text += "\ndetail: " + problems[i].substr(0, problems[i].find('\n'));
    throw Error(text);
  }
  const Checkpoint checkpoint(directory);
  if (config.json) {
    ordered_json root = as_json(checkpoint);
    if (config.verify) root["verified"] = true;
    print_line(root.dump(2));
    return 0;
  }
  print_checkpoint(checkpoint);
  if (config.verify) {
    print_line("");
    print_line(cat("verified: all ", format_count(total_bytes(checkpoint.manifest())),
                   " bytes are as they were written"));
  }
  return 0;
}

std::string owner_text(const Leftover& leftover) {
  switch (leftover.owner) {
    case Leftover::Owner::kNone:
      return "set aside by a save";
    case Leftover::Owner::kAlive:
      return leftover.writer + ", alive";
    case Leftover::Owner::kGone:
      return leftover.writer + ", gone";
    case Leftover::Owner::kUnknown:
      return leftover.writer + ", which may be alive";
  }
  return {};
}

// Lists leftovers of interrupted saves, and removes them with --sweep.
ordered_json show_leftovers(const fs::path& root, const InspectCheckpointConfig& config) {
  ordered_json list = ordered_json::array();
  Rows table = {{"left over", "bytes", "unchanged for", "writer"}};
  const std::vector<Leftover> leftovers = find_leftovers(root);
  for (const Leftover& leftover : leftovers) {
    const bool removed = config.sweep && leftover.is_dead() && remove_leftover(leftover);
    const std::string name = leftover.path.filename().string();
    table.push_back({name, format_count(leftover.bytes), format_duration(leftover.age_seconds),
                     owner_text(leftover) + (removed ? "; removed" : "")});
    list.push_back({{"name", name},
                    {"bytes", leftover.bytes},
                    {"age_seconds", leftover.age_seconds},
                    {"writer", owner_text(leftover)},
                    {"dead", leftover.is_dead()},
                    {"removed", removed}});
  }
  if (config.json || leftovers.empty()) return list;
  print_line("");
  print_rows(table, {1, 2});
  if (!config.sweep && std::any_of(leftovers.begin(), leftovers.end(),
                                   [](const Leftover& l) { return l.is_dead(); }))
    print_line(cat("those without a live writer are removed by megatron inspect-checkpoint ",
                   root.string(), " --sweep"));
  return list;
}

// A folder: prints one line per checkpoint. Returns 1 if one is damaged.
int inspect_folder(const fs::path& root, const InspectCheckpointConfig& config) {
  const std::vector<CheckpointEntry> entries =
      find_checkpoints(root, config.verify ? CheckDepth::kFull : CheckDepth::kManifest);
  MEGATRON_CHECK(!entries.empty() || !find_leftovers(root).empty(), root.string(),
                 ": holds no checkpoint and is none",
                 "\nhint: give the folder named by --save, or one iter_* directory in it");
  ordered_json list = ordered_json::array();
  Rows table = {
      {"checkpoint", "written", "tensors", "bytes", config.verify ? "verified" : "manifest"}};
  bool damaged = false;
  for (const CheckpointEntry& entry : entries) {
    const std::string name = entry.directory.filename().string();
    ordered_json item = {{"iteration", entry.iteration},
                         {"directory", entry.directory.string()},
                         {"usable", entry.problem.empty()}};
    if (entry.problem.empty()) {
      const Checkpoint checkpoint(entry.directory);
      const Manifest& manifest = checkpoint.manifest();
      table.push_back({name, manifest.created, format_count(manifest.tensors.size()),
                       format_count(total_bytes(manifest)), "whole"});
      item.update({{"created", manifest.created},
                   {"num_tensors", manifest.tensors.size()},
                   {"file_bytes", total_bytes(manifest)}});
    } else {
      damaged = true;
      table.push_back(
          {name, "", "", "", "DAMAGED: " + entry.problem.substr(0, entry.problem.find('\n'))});
      item["problem"] = entry.problem;
    }
    list.push_back(std::move(item));
  }
  if (!config.json) print_rows(table, {2, 3});
  const ordered_json leftovers = show_leftovers(root, config);
  if (config.json)
    print_line(
        ordered_json{{"directory", root.string()}, {"checkpoints", list}, {"leftovers", leftovers}}
            .dump(2));
  return damaged ? 1 : 0;
}

}  // namespace

int inspect_checkpoint(int argc, char** argv) {
  InspectCheckpointConfig config;
  Config* const configs[] = {&config};
  if (!parse_or_help("Usage: megatron inspect-checkpoint DIRECTORY [flags]", configs, argc, argv,
                     {.allow_config_file = false, .positional = "directory"}))
    return 0;
  const fs::path directory(config.directory);
  std::error_code ignored;
  MEGATRON_CHECK(fs::is_directory(directory, ignored), directory.string(), ": is not a folder");
  const bool is_one = fs::exists(directory / kManifestName, ignored) ||
                      directory.filename().string().rfind("iter_", 0) == 0;
  MEGATRON_CHECK(!is_one || !config.sweep, "--sweep takes the folder of the checkpoints, ",
                 directory.string(), " is one of them");
  return is_one ? inspect_one(directory, config) : inspect_folder(directory, config);
}

}  // namespace megatron
