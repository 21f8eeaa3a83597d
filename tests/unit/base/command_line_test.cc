#include "tools/support/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"
#include "megatron/base/log.h"
#include "tests/unit/base/capture.h"

namespace megatron {

int version(int argc, char** argv);  // tools/commands/version.cc

namespace {

using testing::HasSubstr;
using testing::StartsWith;

int succeed(int argc, char** argv) {
  std::string line;
  for (int i = 0; i < argc; ++i) line += std::string(argv[i]) + ";";
  print_line(line);
  return 0;
}
int lose_peer(int, char**) { throw RetryError("rank 3 is gone"); }
int misuse(int, char**) {
  throw UsageError("--a \"x\" is not an integer\nunknown flag --b\nhint: legal values: 1, 2");
}
int fail(int, char**) { throw Error("disk is full\ndetail: 3 bytes missing\nhint: buy another"); }
int break_down(int, char**) {
  MEGATRON_ASSERT(1 == 2, "sums");
  return 0;
}
int out_of_range(int, char**) { return std::string().at(3); }
int from_library(int, char**) {
  throw std::runtime_error(
      "sizes differ\nsecond line\nException raised from f at x.cc:1\nframe #0");
}
int throw_number(int, char**) { throw 3; }

constexpr Command kCommands[] = {{"succeed", succeed, "prints its arguments"},
                                 {"misuse", misuse, "x"},
                                 {"fail", fail, "x"},
                                 {"lose-peer", lose_peer, "x"},
                                 {"break-down", break_down, "x"},
                                 {"out-of-range", out_of_range, "x"},
                                 {"from-library", from_library, "x"},
                                 {"throw-number", throw_number, "x"},
                                 {"version", version, "x"}};

struct Outcome {
  int code;
  std::string out, err;
};

Outcome run(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "megatron");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  Outcome outcome;
  Capture out(STDOUT_FILENO), err(STDERR_FILENO);
  outcome.code = run_command_line(kCommands, static_cast<int>(arguments.size()), argv.data());
  outcome.out = out.finish();
  outcome.err = err.finish();
  return outcome;
}

TEST(CommandLine, RunsTheNamedCommandWithItsOwnArguments) {
  const Outcome o = run({"succeed", "--x", "1"});
  EXPECT_EQ(o.code, 0);
  EXPECT_EQ(o.out, "succeed;--x;1;\n");
  EXPECT_EQ(run({"help", "succeed"}).out, "succeed;--help;\n");
}

TEST(CommandLine, HelpListsEveryCommand) {
  for (const char* word : {"--help", "-h", "help"}) {
    const Outcome o = run({word});
    EXPECT_EQ(o.code, 0);
    EXPECT_THAT(o.out, HasSubstr("  succeed       prints its arguments\n"));
    EXPECT_THAT(o.out, HasSubstr("  throw-number  x\n"));
  }
  const Outcome none = run({});
  EXPECT_EQ(none.code, 2);
  EXPECT_THAT(none.err, StartsWith("Usage: megatron <command> [flags]\n"));
}

TEST(CommandLine, UnknownCommandsGetTheNearestName) {
  const Outcome o = run({"suceed"});
  EXPECT_EQ(o.code, 2);
  EXPECT_THAT(o.err, StartsWith("error: unknown command suceed; did you mean succeed?\nhint: the "
                                "commands are succeed, misuse"));
  EXPECT_EQ(run({"help", "zzz"}).code, 2);
}

TEST(CommandLine, ErrorsHaveTheirFormAndExitCode) {
  Outcome o = run({"misuse"});
  EXPECT_EQ(o.code, 2);
  EXPECT_EQ(
      o.err,
      "error: --a \"x\" is not an integer\nerror: unknown flag --b\nhint: legal values: 1, 2\n");
  o = run({"fail"});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.err, "error: disk is full\ndetail: 3 bytes missing\nhint: buy another\n");
  o = run({"break-down"});
  EXPECT_EQ(o.code, 3);
  EXPECT_THAT(o.err, StartsWith("error: internal error: "));
  EXPECT_THAT(o.err, HasSubstr("command_line_test.cc"));
  o = run({"out-of-range"});
  EXPECT_EQ(o.code, 3);
  EXPECT_THAT(o.err, StartsWith("error: internal error: basic_string::at"));
  o = run({"from-library"});
  EXPECT_EQ(o.code, 1);
  EXPECT_EQ(o.err, "error: sizes differ\ndetail: second line\n");
  o = run({"throw-number"});
  EXPECT_EQ(o.code, 3);
  EXPECT_EQ(o.err, "error: internal error: an exception of unknown type\n");
}

TEST(CommandLine, NamesTheRankOfSeveral) {
  ::setenv("WORLD_SIZE", "4", 1);
  ::setenv("RANK", "3", 1);
  const Outcome o = run({"fail"});
  ::unsetenv("WORLD_SIZE");
  ::unsetenv("RANK");
  EXPECT_EQ(o.err, "error: [rank 3] disk is full\ndetail: 3 bytes missing\nhint: buy another\n");
  EXPECT_EQ(format_error("", false, ""), "error: failed without a message\n");
}

TEST(CommandLine, WhatMayBeTriedAgainHasACodeOfItsOwn) {
  const Outcome o = run({"lose-peer"});
  EXPECT_EQ(o.code, kExitRetry);
  EXPECT_EQ(o.err, "error: rank 3 is gone\n");
}

TEST(Version, NamesEveryLibrary) {
  const Outcome o = run({"version", "--json"});
  EXPECT_EQ(o.code, 0) << o.err;
  const auto json = nlohmann::json::parse(o.out);
  for (const char* name : {"zlib", "zstd", "pcre2", "utf8proc", "xxhash", "yaml-cpp",
                           "nlohmann-json", "simdjson", "glibc"})
    EXPECT_THAT(json["libraries"][name].get<std::string>(),
                testing::ContainsRegex("^[0-9]+\\.[0-9]+"))
        << name;
  EXPECT_FALSE(json["megatron"].get<std::string>().empty());
  EXPECT_FALSE(json["compiler"].get<std::string>().empty());
  EXPECT_THAT(run({"--version"}).out, HasSubstr("  zlib            "));
  EXPECT_THAT(run({"version", "--help"}).out, HasSubstr("--json"));
  EXPECT_EQ(run({"version", "--jsn"}).err, "error: unknown flag --jsn; did you mean --json?\n");
}

TEST(CommandLine, AFullStandardOutputIsAFailure) {
  for (std::string command : {"succeed", "--help", "help"}) {
    const int keep = ::dup(STDOUT_FILENO);
    const int full = ::open("/dev/full", O_WRONLY);
    ASSERT_GE(full, 0);
    std::string name = "megatron";
    char* argv[] = {name.data(), command.data(), nullptr};
    Capture err(STDERR_FILENO);
    ::dup2(full, STDOUT_FILENO);
    const int code = run_command_line(kCommands, 2, argv);
    ::dup2(keep, STDOUT_FILENO);
    ::close(keep);
    ::close(full);
    EXPECT_EQ(code, 1);
    EXPECT_EQ(err.finish(), "error: cannot write to standard output: No space left on device\n")
        << command;
  }
}

TEST(CommandLine, ADeletedWorkingDirectoryIsNamed) {
  const std::filesystem::path keep = std::filesystem::current_path();
  const std::filesystem::path gone =
      std::filesystem::path(testing::TempDir()) / cat("gone", ::getpid());
  std::filesystem::create_directory(gone);
  std::filesystem::current_path(gone);
  std::filesystem::remove(gone);
  const Outcome o = run({"succeed"});
  std::filesystem::current_path(keep);
  EXPECT_EQ(o.code, 1);
  EXPECT_THAT(
      o.err,
      StartsWith("error: the working directory cannot be used: No such file or directory\nhint: "));
  EXPECT_EQ(o.out, "");
}

}  // namespace
}  // namespace megatron
