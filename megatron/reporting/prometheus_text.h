// Pieces of Prometheus' text format.
// Format: https://prometheus.io/docs/instrumenting/exposition_formats/
#pragma once

#include <string>
#include <string_view>

namespace megatron {

// name="value", with the value escaped.
std::string prometheus_label(std::string_view name, std::string_view value);

std::string prometheus_number(double value);

}  // namespace megatron
