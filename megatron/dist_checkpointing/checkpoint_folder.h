// The folder that holds the checkpoints of a run: what is in it, where to start from, what to
// delete.
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
  kManifest,       // the manifest, the presence and size of every file
  kConfiguration,  // and every byte of the files that hold no tensors
  kFull,           // every byte
};

// The iter_* directories of a folder, newest first. A missing folder has none. Throws AccessError
// for a folder or checkpoint that cannot be read: that is no problem of a checkpoint.
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
  std::optional<int64_t> ckpt_step;  // this iteration and no other
  bool allow_existing = false;       // a fresh start may write into a folder that holds checkpoints
  CheckDepth depth = CheckDepth::kFull;  // of what is resumed from
};

struct StartDecision {
  std::optional<CheckpointEntry> checkpoint;  // empty: start from the beginning
  std::vector<std::string> warnings;          // damaged checkpoints that were passed over, by name
};

// Decides where a run starts; what is resumed from has been verified as far as `depth` says. With
// several ranks, each reads a share of every checkpoint that is looked at, and all decide alike.
// Collective over `ranks` (null: one).
//   kFresh          nothing is loaded; refused when `save` holds checkpoints, unless
//                   allow_existing.
//   kResume         a missing folder, or one without a usable checkpoint, is an error.
//   kResumeOrFresh  a missing folder, or one without any checkpoint, starts fresh; one whose
//                   checkpoints are all damaged
//                   is an error.
// The newest usable checkpoint is taken, and newer damaged ones are reported. A checkpoint that
// cannot be reached (AccessError) ends the start: an older one would throw away work. Throws Error.
StartDecision resolve_start(const StartRequest& request, Agreement* ranks = nullptr);

// Applies the retention after `newest` was written, read back by its writers and published: looks
// at manifests and sizes, reads no tensor, and deletes. Returns warnings. Deletion renames first,
// so that a kill leaves no half checkpoint under a checkpoint's name. Leftovers of dead writers go
// as well; called by save_checkpoint. `progress` is called again and again.
std::vector<std::string> apply_retention(const std::filesystem::path& root, int64_t newest,
                                         const Retention& retention,
                                         const std::function<void()>& progress = {});

}  // namespace megatron
