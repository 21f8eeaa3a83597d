// A configuration with one field of every kind, for the tests of parsing.
#pragma once

#include <array>
#include <string_view>

#include "megatron/base/fields.h"

namespace megatron {

enum class Shape { kRound, kSquare, kWavy };

struct SampleConfig : Config {
  int64_t num_layers = 2;
  double lr = 0.5;
  std::string save = "";
  bool bf16 = false;
  bool add_bias_linear = true;
  Shape shape = Shape::kRound;
  std::optional<int64_t> num_query_groups;
  std::optional<double> init_std;
  std::vector<int64_t> sizes;
  std::vector<double> betas = {0.9, 0.95};
  std::vector<std::string> data_path;

  void fields(FieldVisitor& v) override {
    static constexpr std::array<std::string_view, 3> kShapes = {"round", "square", "wavy-line"};
    v.group("network size");
    v.field("num_layers", num_layers, "layers of the network");
    v.choice("shape", shape, kShapes, "its shape");
    v.field("num_query_groups", num_query_groups, "groups of queries");
    v.field({"add_bias_linear", "--disable-bias-linear", true}, add_bias_linear,
            "leave the biases out");
    v.group("training");
    v.field({"lr", "--lr --learning-rate"}, lr, "learning rate");
    v.field("bf16", bf16, "compute in bf16");
    v.field("init_std", init_std, "spread of the first weights");
    v.field("save", save, "folder of checkpoints");
    v.field("sizes", sizes, "sizes of something");
    v.field("betas", betas, "decay of the moments");
    v.field("data_path", data_path, "prefixes of datasets");
  }
  void validate(Violations& violations) const override {
    if (num_layers < 1) violations.add(cat_number("--num-layers ", num_layers), "1 or more");
    if (lr < 0) violations.add("--lr is below 0");
  }
  static std::string cat_number(const char* text, int64_t n) {
    return text + std::to_string(n) + " is below 1";
  }
  bool operator==(const SampleConfig& o) const {
    return num_layers == o.num_layers && lr == o.lr && save == o.save && bf16 == o.bf16 &&
           add_bias_linear == o.add_bias_linear && shape == o.shape &&
           num_query_groups == o.num_query_groups && init_std == o.init_std && sizes == o.sizes &&
           betas == o.betas && data_path == o.data_path;
  }
};

}  // namespace megatron
