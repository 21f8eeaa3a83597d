// The folder with the checkpoints of a run: what it contains, where to start from, what to delete.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "megatron/dist_checkpointing/save.h"

namespace megatron {

inline constexpr const char* kLatestName = "latest_checkpointed_iteration.txt";

std::string checkpoint_name(int64_t iteration);  // "iter_0000100"

struct CheckpointEntry {
  int64_t iteration = 0;
  std::filesystem::path directory;
  std::string problem;  // empty: usable; else the text of the first error
};

enum class CheckDepth {
  kManifest,       // the manifest, and that every file exists with its size
  kConfiguration,  // and every byte of the files without tensors
  kFull,           // every byte of every file
};

// The iter_* directories of a folder, newest first; none if the folder is missing. Throws
// AccessError if a folder or checkpoint cannot be read: that does not make a checkpoint damaged.
std::vector<CheckpointEntry> find_checkpoints(const std::filesystem::path& root,
                                              CheckDepth depth = CheckDepth::kManifest);

// The iteration in latest_checkpointed_iteration.txt: a hint for people and scripts, never trusted
// by a reader.
std::optional<int64_t> read_latest_hint(const std::filesystem::path& root);

// --start-mode fresh | resume | resume-or-fresh
enum class StartMode { kFresh, kResume, kResumeOrFresh };

struct StartRequest {
  StartMode mode = StartMode::kFresh;
  std::filesystem::path load;        // folder of checkpoints, or one checkpoint; empty: none given
  std::filesystem::path save;        // folder that will be written; empty: none
  std::optional<int64_t> ckpt_step;  // only this iteration
  bool allow_existing = false;       // a fresh start may write into a folder that holds checkpoints
  CheckDepth depth = CheckDepth::kFull;  // depth of the check before resuming
};

struct StartDecision {
  std::optional<CheckpointEntry> checkpoint;  // empty: start from the beginning
  std::vector<std::string> warnings;          // damaged checkpoints that were skipped, by name
};

// Decides where a run starts; the checkpoint to resume from has been verified to `depth`. With
// several ranks, each reads a share of every candidate checkpoint, and all decide alike. Collective
// over `ranks` (null: one rank).
//   kFresh          nothing is loaded; refused if `save` holds checkpoints, unless allow_existing.
//   kResume         a missing folder, or one without a usable checkpoint, is an error.
//   kResumeOrFresh  a missing folder, or one without any checkpoint, starts fresh; a folder whose
//                   checkpoints are all damaged is an error.
// The newest usable checkpoint is used, and newer damaged ones are reported. A checkpoint that
// cannot be accessed (AccessError) ends the start: resuming from an older one would lose work.
// Throws Error.
StartDecision resolve_start(const StartRequest& request, Agreement* ranks = nullptr);

// Applies the retention after `newest` was written, read back by its writers and published: checks
// manifests and sizes without reading tensors, and deletes. Returns warnings. Deletion renames
// first, so that a kill never leaves a partial checkpoint under a checkpoint's name. Also removes
// leftovers of dead writers; called by save_checkpoint. `progress` is called repeatedly.
std::vector<std::string> apply_retention(const std::filesystem::path& root, int64_t newest,
                                         const Retention& retention,
                                         const std::function<void()>& progress = {});

}  // namespace megatron
