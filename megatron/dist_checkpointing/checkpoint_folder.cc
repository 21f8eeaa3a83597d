#include "megatron/dist_checkpointing/checkpoint_folder.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/dist_checkpointing/access_error.h"
#include "megatron/dist_checkpointing/checkpoint.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/detail/ownership.h"
#include "megatron/dist_checkpointing/verify.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

// "iter_0000100" -> 100; nullopt for other names (temporary ones, those moved aside).
std::optional<int64_t> iteration_of(const std::string& name) {
  constexpr std::string_view kPrefix = "iter_";
  if (name.size() < kPrefix.size() + 7 || name.rfind(kPrefix, 0) != 0) return std::nullopt;
  int64_t iteration = 0;
  const char* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, iteration);
  if (error != std::errc() || stop != end || iteration < 0 || checkpoint_name(iteration) != name)
    return std::nullopt;
  return iteration;
}

std::string problem_of(const CheckpointEntry& entry, CheckDepth depth, Agreement& ranks) {
  if (depth != CheckDepth::kManifest) {
    VerifyOptions options;
    options.tensor_files = depth == CheckDepth::kFull;
    const std::vector<std::string> problems = verify_checkpoint(entry.directory, ranks, options);
    if (!problems.empty()) return problems[0];
  }
  return decide_together(ranks, [&] {
    return damage_of([&] {
      const Checkpoint checkpoint(entry.directory);
      MEGATRON_CHECK(checkpoint.iteration() == entry.iteration, entry.directory.string(),
                     ": its manifest is of iteration ", checkpoint.iteration());
    });
  });
}

// The iter_* directories, newest first, without checking them.
std::vector<CheckpointEntry> list(const fs::path& root) {
  std::vector<CheckpointEntry> entries;
  if (!path_exists(root)) return entries;
  for (const fs::path& path : paths_in(root))
    if (const auto iteration = iteration_of(path.filename().string()))
      entries.push_back({*iteration, path, {}});
  std::sort(entries.begin(), entries.end(), [](const CheckpointEntry& a, const CheckpointEntry& b) {
    return a.iteration > b.iteration;
  });
  return entries;
}

// The first line of a message, for lists.
std::string indented(const std::string& text) {
  std::string out = text;
  const size_t line = out.find('\n');
  return line == std::string::npos ? out : out.substr(0, line);
}

// Lists the checkpoints that a run may resume from; one directory given directly counts as the only
// one.
std::vector<CheckpointEntry> candidates(const StartRequest& request) {
  const fs::path load = request.load.has_filename() ? request.load : request.load.parent_path();
  if (const auto iteration = iteration_of(load.filename().string());
      iteration && list(load).empty())
    return {{*iteration, load, {}}};
  return list(request.load);
}

StartDecision newest_usable(const StartRequest& request, std::vector<CheckpointEntry> entries,
                            Agreement& ranks) {
  StartDecision decision;
  for (CheckpointEntry& entry : entries) {
    if (request.ckpt_step && entry.iteration != *request.ckpt_step) continue;
    entry.problem = problem_of(entry, request.depth, ranks);
    if (entry.problem.empty()) {
      decision.checkpoint = std::move(entry);
      return decision;
    }
    decision.warnings.push_back(entry.problem);
  }
  std::string details;
  for (const std::string& warning : decision.warnings) details += "\ndetail: " + indented(warning);
  if (request.ckpt_step && decision.warnings.empty()) {
    for (const CheckpointEntry& entry : entries)
      details += (details.empty() ? "\nhint: there are " : ", ") + std::to_string(entry.iteration);
    throw Error(cat(request.load.string(), ": has no checkpoint of --ckpt-step ",
                    *request.ckpt_step, details));
  }
  throw Error(cat(request.load.string(), ": ",
                  request.ckpt_step
                      ? cat("the checkpoint of --ckpt-step ", *request.ckpt_step, " is damaged")
                      : std::string("every checkpoint in it is damaged"),
                  details,
                  "\nhint: move the damaged directories away to start without them, or restore "
                  "them from a copy"));
}

}  // namespace

std::string checkpoint_name(int64_t iteration) {
  return format_text("iter_%07lld", static_cast<long long>(iteration));
}

std::vector<CheckpointEntry> find_checkpoints(const fs::path& root, CheckDepth depth) {
  std::vector<CheckpointEntry> entries = list(root);
  Agreement alone;
  for (CheckpointEntry& entry : entries) entry.problem = problem_of(entry, depth, alone);
  return entries;
}

std::optional<int64_t> read_latest_hint(const fs::path& root) {
  try {
    const InputFile in(root / kLatestName);
    std::string text(std::min<uint64_t>(in.size(), 32), '\0');
    in.read_at(0, text.data(), text.size());
    while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
    int64_t iteration = 0;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), iteration);
    if (error == std::errc() && stop == text.data() + text.size() && iteration >= 0)
      return iteration;
  } catch (const Error&) {
  }
  return std::nullopt;
}

namespace {

// The checkpoints to choose from; none: a fresh start.
std::vector<CheckpointEntry> entries_to_start_from(const StartRequest& request) {
  if (request.mode == StartMode::kFresh) {
    if (request.save.empty() || request.allow_existing) return {};
    const std::vector<CheckpointEntry> existing = list(request.save);
    MEGATRON_CHECK(existing.empty(), request.save.string(), ": holds checkpoints already (newest ",
                   existing.empty() ? std::string() : existing[0].directory.filename().string(),
                   "), and --start-mode fresh would write among them\nhint: give another --save "
                   "folder, continue with --load ",
                   request.save.string(), " --start-mode resume, or remove them");
    return {};
  }
  MEGATRON_CHECK(!request.load.empty(),
                 "--start-mode resume needs --load, the folder of the checkpoints");
  const bool may_be_fresh = request.mode == StartMode::kResumeOrFresh && !request.ckpt_step;
  const bool exists = path_exists(request.load);
  MEGATRON_CHECK(exists || may_be_fresh, request.load.string(),
                 ": there is no such folder to resume from\nhint: --start-mode resume-or-fresh "
                 "starts from the beginning when "
                 "there is nothing yet, --start-mode fresh always does");
  MEGATRON_CHECK(!exists || fs::is_directory(request.load), request.load.string(),
                 ": is not a folder");
  std::vector<CheckpointEntry> entries = candidates(request);
  if (entries.empty()) {
    MEGATRON_CHECK(may_be_fresh, request.load.string(),
                   ": holds no checkpoint (no directory iter_0000000 or the like)",
                   "\nhint: give the folder that --save named, or one iter_* directory in it; to "
                   "train from the beginning, "
                   "--start-mode resume-or-fresh or fresh");
    return {};
  }
  return entries;
}

// "10 /run/iter_0000010", terminated by a NUL, which no path contains.
std::string to_text(const std::vector<CheckpointEntry>& entries) {
  std::string text;
  for (const CheckpointEntry& entry : entries)
    text += cat(entry.iteration, " ", entry.directory.string()) + '\0';
  return text;
}

std::vector<CheckpointEntry> entries_from_text(const std::string& text) {
  std::vector<CheckpointEntry> entries;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line, '\0');)
    entries.push_back({std::stoll(line), line.substr(line.find(' ') + 1), {}});
  return entries;
}

}  // namespace

StartDecision resolve_start(const StartRequest& request, Agreement* ranks) {
  Agreement alone;
  Agreement& all = ranks != nullptr ? *ranks : alone;
  std::vector<CheckpointEntry> entries = entries_from_text(
      decide_together(all, [&] { return to_text(entries_to_start_from(request)); }));
  if (entries.empty()) return {};
  return newest_usable(request, std::move(entries), all);
}

std::vector<std::string> apply_retention(const fs::path& root, int64_t newest,
                                         const Retention& retention,
                                         const std::function<void()>& progress) {
  std::vector<std::string> warnings;
  const auto is_multiple = [&](int64_t iteration) {
    return retention.retain_interval && *retention.retain_interval > 0 &&
           iteration % *retention.retain_interval == 0;
  };
  std::vector<fs::path> victims;
  if (retention.retain_interval || retention.keep_last) {
    int64_t older = 0;  // usable checkpoints before `newest`, counted from it
    for (const CheckpointEntry& entry : find_checkpoints(root)) {
      if (entry.iteration >= newest || !entry.problem.empty()) continue;
      ++older;
      const bool goes =
          retention.keep_last ? older >= std::max<int64_t>(1, *retention.keep_last) : older == 1;
      if (goes && !is_multiple(entry.iteration)) victims.push_back(entry.directory);
    }
  }
  const std::vector<fs::path> leftovers = dead_leftovers(root);
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const std::exception& error) {
      warnings.push_back(error.what());
    }
  };
  for (const fs::path& victim : victims)
    attempt([&] {
      const fs::path doomed = temporary_path(victim);
      rename_path(victim, doomed);
      sync_directory(root);
      remove_tree(doomed, progress);
    });
  for (const fs::path& leftover : leftovers) attempt([&] { remove_tree(leftover, progress); });
  return warnings;
}

}  // namespace megatron
