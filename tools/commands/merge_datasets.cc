// megatron merge-datasets: concatenates indexed datasets.
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/datasets/indexed_dataset_builder.h"

namespace megatron {
namespace {

struct MergeDatasetsConfig : Config {
  std::vector<std::string> input;
  std::string output_prefix;
  bool multimodal = false;
  bool overwrite = false;
  bool json = false;

  void fields(FieldVisitor& v) override {
    v.group("merge-datasets");
    v.field("input", input,
            "dataset prefixes in the order wanted, or one folder with datasets, merged in the "
            "order of their names");
    v.field("output_prefix", output_prefix, "prefix of the merged dataset");
    v.field("multimodal", multimodal, "the datasets have a mode for each sequence");
    v.field("overwrite", overwrite, "replace a data set of that prefix; without it it is refused");
    v.field("json", json, "print the result as JSON");
  }
  void validate(Violations& violations) const override {
    if (input.empty())
      violations.add("merge-datasets needs --input", "--input a_text_document b_text_document");
    if (output_prefix.empty())
      violations.add("merge-datasets needs --output-prefix", "--output-prefix merged");
  }
};

// The prefixes of all datasets in a folder, in the order of their names.
std::vector<std::string> prefixes_in(const std::string& folder) {
  std::set<std::string> stems;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto extension = entry.path().extension();
    if (extension != ".idx" && extension != ".bin") continue;
    const std::string prefix = (entry.path().parent_path() / entry.path().stem()).string();
    MEGATRON_CHECK(indexed_dataset_exists(prefix), prefix, ": has only one of .bin and .idx");
    stems.insert(prefix);
  }
  MEGATRON_CHECK(!stems.empty(), folder, ": the folder holds no datasets");
  return {stems.begin(), stems.end()};
}

}  // namespace

int merge_datasets(int argc, char** argv) {
  MergeDatasetsConfig config;
  Config* const configs[] = {&config};
  if (!parse_or_help("megatron merge-datasets --input PREFIX PREFIX ... --output-prefix PREFIX",
                     configs, argc, argv, {.allow_config_file = false, .positional = "input"}))
    return 0;
  std::vector<std::string> inputs = config.input;
  if (inputs.size() == 1 && std::filesystem::is_directory(inputs[0]))
    inputs = prefixes_in(inputs[0]);
  refuse_existing_dataset(config.output_prefix, config.overwrite);
  merge_indexed_datasets(inputs, config.output_prefix, config.multimodal,
                         cat("megatron ", MEGATRON_VERSION));
  const IndexedDataset merged(config.output_prefix, {.multimodal = config.multimodal});
  if (config.json) {
    JsonWriter json;
    json.begin_object().member("output_prefix", config.output_prefix).member("inputs", inputs);
    json.member("num_sequences", merged.num_sequences())
        .member("num_documents", merged.num_documents());
    json.member("num_tokens", merged.num_tokens())
        .member("dtype", to_string(merged.type()))
        .end_object();
    print_line(json.text());
  } else {
    print_line(cat(config.output_prefix, ": ", format_count(merged.num_documents()), " documents, ",
                   format_count(merged.num_tokens()), " tokens from ", inputs.size(), " datasets"));
  }
  return 0;
}

}  // namespace megatron
