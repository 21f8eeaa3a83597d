#include "megatron/datasets/data_config.h"

#include <cmath>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr std::string_view kDataloaderTypes[] = {"single", "cyclic"};

}  // namespace

void DataConfig::fields(FieldVisitor& v) {
  v.group("data and dataloader");
  v.field("data_path", data_path,
          "datasets of all splits: prefix, or weight prefix weight prefix ...");
  v.field("data_args_path", data_args_path,
          "file with the words of --data-path, separated by white space");
  v.field("split", split,
          "shares of train, valid and test of the sequences, such as 969,30,1 (the default of "
          "--data-path)");
  v.field("train_data_path", train_data_path, "datasets for training only, like --data-path");
  v.field("valid_data_path", valid_data_path, "datasets for validation only, like --data-path");
  v.field("test_data_path", test_data_path, "datasets for the test only, like --data-path");
  v.field("per_split_data_args_path", per_split_data_args_path,
          "JSON file with the keys train, valid and test, each a list or a string as --data-path");
  v.field("data_cache_path", data_cache_path,
          "folder of the cached sample order; default: cache/ under each data prefix");
  v.field("mock_data", mock_data, "train on synthetic documents that count upwards");
  v.field({"mmap_bin_files", "--no-mmap-bin-files", true}, mmap_bin_files,
          "read .bin files with pread instead of mapping them");
  v.field("mid_level_dataset_surplus", mid_level_dataset_surplus,
          "share of samples that members of a blend are built with beyond what it takes");
  v.field("num_dataset_builder_threads", num_dataset_builder_threads,
          "datasets of a blend that are opened at once");
  v.role(FieldRole::kNumerics);
  v.field("reset_position_ids", reset_position_ids,
          "positions start again after each end-of-document token");
  v.field("reset_attention_mask", reset_attention_mask,
          "attention does not cross end-of-document tokens");
  v.field("dataloader_inter_document_masking", dataloader_inter_document_masking,
          "attention does not cross, and positions start again at, the boundaries of the documents "
          "in the data files");
  v.field("eod_mask_loss", eod_mask_loss, "no loss at end-of-document tokens");
  v.role(FieldRole::kRun);
  v.field("allow_ambiguous_pad_tokens", allow_ambiguous_pad_tokens,
          "mask the loss of the pad token even when it is also the end-of-document token");
  v.choice("dataloader_type", dataloader_type, kDataloaderTypes,
           "single: one pass in the order of the dataset; cyclic: a new random order each pass");
  v.field({"data_sharding", "--no-data-sharding", true}, data_sharding,
          "cyclic: permute all samples together instead of the share of each data-parallel rank");
  v.field("num_workers", num_workers,
          "threads that read batches ahead; 0: read in the training thread");

  v.group("validation");
  v.field("full_validation", full_validation,
          "each evaluation reads the whole validation split once");
  v.field("multiple_validation_sets", multiple_validation_sets,
          "evaluate each dataset of validation separately");
  v.field("validation_set_names", validation_set_names, "names of the validation sets in logs");
}

void DataConfig::validate(Violations& violations) const {
  const bool per_split =
      !train_data_path.empty() || !valid_data_path.empty() || !test_data_path.empty();
  const int sources = !data_path.empty() + !data_args_path.empty() + per_split +
                      !per_split_data_args_path.empty() + mock_data;
  if (sources > 1) {
    violations.add("more than one source of data is given",
                   "use one of --data-path, --data-args-path, --train/valid/test-data-path, "
                   "--per-split-data-args-path, "
                   "--mock-data");
  }
  if (!split.empty() && (per_split || !per_split_data_args_path.empty()))
    violations.add("--split has no effect with a data path for each split", "leave it out");
  if (dataloader_inter_document_masking && (reset_position_ids || reset_attention_mask)) {
    violations.add(
        "--dataloader-inter-document-masking excludes --reset-position-ids and "
        "--reset-attention-mask",
        "it already restarts positions and attention at each document");
  }
  if (!(std::isfinite(mid_level_dataset_surplus) && mid_level_dataset_surplus >= 0))
    violations.add(cat("--mid-level-dataset-surplus is ", mid_level_dataset_surplus),
                   "0 or more, such as 0.005");
  if (num_workers < 0) violations.add(cat("--num-workers is ", num_workers), "0 or more");
  if (num_dataset_builder_threads < 1)
    violations.add(cat("--num-dataset-builder-threads is ", num_dataset_builder_threads),
                   "1 or more");
  if (multiple_validation_sets && !data_path.empty())
    violations.add("--multiple-validation-sets needs separate validation datasets",
                   "give them with --valid-data-path or --per-split-data-args-path");
  if (!validation_set_names.empty() && !multiple_validation_sets)
    violations.add("--validation-set-names has no effect without --multiple-validation-sets");
}

}  // namespace megatron
