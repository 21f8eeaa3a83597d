// Files of Megatron-Energon that describe data sets.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace megatron {

// A file of YAML, or of JSON, which is YAML. Throws Error that names it.
nlohmann::json read_energon_meta(const std::filesystem::path& file);

}  // namespace megatron
