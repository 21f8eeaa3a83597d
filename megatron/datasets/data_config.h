// The flags of data sources and data loading.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megatron/base/fields.h"

namespace megatron {

enum class DataloaderType { kSingle, kCyclic };

struct DataConfig : Config {
  std::vector<std::string> data_path;  // [weight] prefix ...
  std::string data_args_path;          // file with the tokens of data_path
  std::string split;                   // "969,30,1"; empty: the default of the source
  std::vector<std::string> train_data_path;
  std::vector<std::string> valid_data_path;
  std::vector<std::string> test_data_path;
  std::string per_split_data_args_path;  // JSON with train, valid, test
  std::string data_cache_path;           // empty: <prefix>/../cache next to the data
  bool mock_data = false;
  bool mmap_bin_files = true;
  double mid_level_dataset_surplus = 0.005;
  int64_t num_dataset_builder_threads = 1;
  bool reset_position_ids = false;
  bool reset_attention_mask = false;
  bool dataloader_inter_document_masking = false;
  bool eod_mask_loss = false;
  bool allow_ambiguous_pad_tokens = false;
  bool full_validation = false;
  bool multiple_validation_sets = false;
  std::vector<std::string> validation_set_names;
  DataloaderType dataloader_type = DataloaderType::kSingle;
  bool data_sharding = true;
  int64_t num_workers = 2;

  void fields(FieldVisitor& visitor) override;
  void validate(Violations& violations) const override;
};

}  // namespace megatron
