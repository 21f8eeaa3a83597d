// megatron version [--json] [--all]: the program, how it was built, and every library in it.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <gnu/libc-version.h>
#include <pcre2.h>
#include <utf8proc.h>
#include <xxhash.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <string>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "tools/support/compute_library.h"
#include "tools/support/torch_version.h"

namespace megatron {
namespace {

struct VersionConfig : Config {
  bool json = false;
  bool all = false;
  void fields(FieldVisitor& visitor) override {
    visitor.field("json", json, "print one JSON object");
    visitor.field("all", all,
                  "load libtorch and show the versions of it and of the libraries it brings, "
                  "CUDA's among them");
  }
};

std::string pcre2_version() {
  char text[64] = "";
  pcre2_config(PCRE2_CONFIG_VERSION, text);
  return text;
}

std::string xxhash_version() {
  const unsigned v = XXH_versionNumber();
  return cat(v / 10000, ".", v / 100 % 100, ".", v % 100);
}

// Unless `loaded`, libtorch's version is the one that this program was built for.
Versions library_versions(bool loaded) {
  Versions all = {
      {"glibc", gnu_get_libc_version()},
      {"nlohmann-json", MEGATRON_NLOHMANN_JSON_VERSION},
      {"pcre2", pcre2_version()},
      {"simdjson", MEGATRON_SIMDJSON_VERSION},
      {"utf8proc", utf8proc_version()},
      {"xxhash", xxhash_version()},
      {"yaml-cpp", MEGATRON_YAMLCPP_VERSION},
      {"zlib", zlibVersion()},
      {"zstd", ZSTD_versionString()},
  };
  if (loaded) {
    void* const function =
        compute_function(compute_library_path(), "megatron_torch_versions", "version --all");
    reinterpret_cast<decltype(&megatron_torch_versions)>(function)(all);
  } else if (*MEGATRON_TORCH_VERSION != '\0') {
    all.emplace_back("libtorch", MEGATRON_TORCH_VERSION);
  }
  return all;
}

}  // namespace

int version(int argc, char** argv) {
  VersionConfig config;
  Config* const configs[] = {&config};
  if (!parse_or_help("Usage: megatron version [flags]", configs, argc, argv,
                     {.allow_config_file = false}))
    return 0;
  const Versions build = {{"compiler", cat(MEGATRON_COMPILER, " ", __VERSION__)},
                          {"build_type", MEGATRON_BUILD_TYPE}};
  const Versions libraries = library_versions(config.all);
  if (config.json) {
    JsonWriter json(2);
    json.begin_object().member("megatron", MEGATRON_VERSION);
    for (const auto& [name, value] : build) json.member(name, value);
    json.key("libraries").begin_object();
    for (const auto& [name, value] : libraries) json.member(name, value);
    json.end_object().end_object();
    print_line(json.text());
    return 0;
  }
  print_line(cat("megatron ", MEGATRON_VERSION));
  for (const Versions& part : {build, libraries})
    for (const auto& [name, value] : part)
      print_line(cat("  ", name, std::string(16 - std::min<size_t>(15, name.size()), ' '), value));
  return 0;
}

}  // namespace megatron
