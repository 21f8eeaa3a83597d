// The folder that holds the checkpoints of a run: what is in it, where to start from, what to delete.
#pragma once

#include <cstdint>
#include <filesystem>
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
  kManifest,  // the manifest, the presence and size of every file
  kFull,      // every byte
};

// The iter_* directories of a folder, newest first. A missing folder has none.
std::vector<CheckpointEntry> find_checkpoints(const std::filesystem::path& root,
                                              CheckDepth depth = CheckDepth::kManifest);

// The iteration in latest_checkpointed_iteration.txt: a hint for people and scripts, never trusted by a reader.
std::optional<int64_t> read_latest_hint(const std::filesystem::path& root);

enum class StartMode { kFresh, kResume, kResumeOrFresh };  // --start-mode fresh | resume | resume-or-fresh

struct StartRequest {
  StartMode mode = StartMode::kFresh;
  std::filesystem::path load;        // folder of checkpoints, or one checkpoint; empty: none given
  std::filesystem::path save;        // folder that will be written; empty: none
  std::optional<int64_t> ckpt_step;  // this iteration and no other
  bool allow_existing = false;       // a fresh start may write into a folder that holds checkpoints
};

struct StartDecision {
  std::optional<CheckpointEntry> checkpoint;  // empty: start from the beginning
  std::vector<std::string> warnings;          // damaged checkpoints that were passed over, by name
};

// Decides where a run starts; what is resumed from has been verified to the last byte.
//   kFresh          nothing is loaded; refused when `save` holds checkpoints, unless allow_existing.
//   kResume         a missing folder, or one without a usable checkpoint, is an error.
//   kResumeOrFresh  a missing folder, or one without any checkpoint, starts fresh; one whose checkpoints are all damaged
//                   is an error.
// The newest usable checkpoint is taken, and newer damaged ones are reported. Throws Error.
StartDecision resolve_start(const StartRequest& request);

// Applies the retention after `newest` was published: verifies it from disk, then deletes. Returns warnings; a checkpoint that
// fails verification is a warning too, and nothing is deleted then. Deletion renames first, so that a kill leaves no half
// checkpoint under a checkpoint's name. Leftovers of dead writers go as well; called by save_checkpoint.
std::vector<std::string> apply_retention(const std::filesystem::path& root, int64_t newest,
                                         const Retention& retention);

}  // namespace megatron
