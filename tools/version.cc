// megatron version [--json]: the program, how it was built, and every library in it.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <gnu/libc-version.h>
#include <pcre2.h>
#include <utf8proc.h>
#include <xxhash.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "tools/commands.h"
#include "tools/torch_version.h"

namespace megatron {
namespace {

struct VersionConfig : Config {
  bool json = false;
  void fields(FieldVisitor& visitor) override { visitor.field("json", json, "print one JSON object"); }
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

Versions library_versions() {
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
  for (auto& entry : torch_versions()) all.push_back(std::move(entry));
  return all;
}

}  // namespace

int version(int argc, char** argv) {
  VersionConfig config;
  Config* const configs[] = {&config};
  ParseOptions options;
  options.allow_config_file = false;
  if (parse_flags(configs, argc, argv, options).help) {
    print_line(help_text("Usage: megatron version [flags]", configs));
    return 0;
  }
  const Versions build = {{"compiler", cat(MEGATRON_COMPILER, " ", __VERSION__)}, {"build_type", MEGATRON_BUILD_TYPE}};
  const Versions libraries = library_versions();
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
