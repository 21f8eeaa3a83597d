#include "tools/support/command_line.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/failure_class.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/base/process_signals.h"

namespace megatron {
namespace {

std::string table_of(std::span<const Command> commands) {
  size_t width = 0;
  for (const Command& command : commands) width = std::max(width, command.name.size());
  std::string out = "Usage: megatron <command> [flags]\n\ncommands:\n";
  for (const Command& command : commands)
    out += cat("  ", command.name, std::string(width + 2 - command.name.size(), ' '),
               command.summary, "\n");
  return out + "\n`megatron <command> --help` lists the flags of a command.";
}

void write_error(std::string_view text) {
  set_status_line("");
  while (!text.empty()) {
    const ssize_t done = ::write(STDERR_FILENO, text.data(), text.size());
    if (done <= 0) return;
    text.remove_prefix(static_cast<size_t>(done));
  }
}

// "[rank 3] " if a launcher started several ranks.
std::string rank_prefix() {
  const char* world = std::getenv("WORLD_SIZE");
  const char* rank = std::getenv("RANK");
  if (world == nullptr || rank == nullptr || std::atoi(world) <= 1) return "";
  return cat("[rank ", rank, "] ");
}

int report(std::string_view message, FailureClass failure) {
  write_error(format_error(message, failure == FailureClass::kUsage, rank_prefix()));
  return exit_code(failure);
}

// Otherwise libraries fail later with an unclear error.
void check_working_directory() {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::current_path(error);
  MEGATRON_CHECK(!folder.empty() && !error,
                 "the working directory cannot be used: ", error.message(),
                 "\nhint: it was deleted or is not readable; change to another one");
}

// Runs `body` and turns whatever it throws into an exit code.
template <class Body>
int guarded(const Body& body) {
  try {
    const int code = body();
    check_standard_output();
    return code;
  } catch (const InternalError& error) {
    return report(error.what(), FailureClass::kInternal);
  } catch (const std::bad_alloc&) {
    return report("out of host memory", FailureClass::kDoNotRetry);
  } catch (const std::logic_error& error) {
    return report(cat("internal error: ", error.what()), FailureClass::kInternal);
  } catch (const std::exception& error) {  // our own, or of the system, libtorch or a device
    return report(error.what(), failure_class(error));
  } catch (...) {
    return report("internal error: an exception of unknown type", FailureClass::kInternal);
  }
}

int run(const Command& command, int argc, char** argv) {
  return guarded([&] {
    check_working_directory();
    return command.run(argc, argv);
  });
}

const Command* find(std::span<const Command> commands, std::string_view name) {
  const auto at = std::find_if(commands.begin(), commands.end(),
                               [&](const Command& c) { return c.name == name; });
  return at == commands.end() ? nullptr : &*at;
}

int unknown_command(std::span<const Command> commands, std::string_view name) {
  std::vector<std::string> names;
  for (const Command& command : commands) names.emplace_back(command.name);
  const std::string near = nearest(name, names);
  return report(cat("unknown command ", name, near.empty() ? "" : "; did you mean ", near,
                    near.empty() ? "" : "?", "\nhint: the commands are ", listed(names)),
                FailureClass::kUsage);
}

bool is_any(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

}  // namespace

std::string format_error(std::string_view message, bool usage, std::string_view where) {
  std::string out;
  bool first = true;
  for (size_t begin = 0; begin < message.size();) {
    const size_t end = std::min(message.find('\n', begin), message.size());
    const std::string_view line = message.substr(begin, end - begin);
    begin = end + 1;
    if (line.empty()) continue;
    // libtorch appends the location and a stack trace, which are not printed.
    if (!usage && line.starts_with("Exception raised from ")) break;
    if (line.starts_with("hint: ") || line.starts_with("detail: "))
      out += cat(line, "\n");
    else
      out += cat(first || usage ? cat("error: ", where) : "detail: ", line, "\n");
    first = false;
  }
  return out.empty() ? cat("error: ", where, "failed without a message\n") : out;
}

int run_command_line(std::span<const Command> commands, int argc, char** argv) {
  install_crash_handler();
  ignore_file_size_signal();
  if (argc < 2) {
    write_error(table_of(commands) + "\n");
    return kExitUsage;
  }
  const std::string_view name = argv[1];
  if (is_any(name, {"--help", "-h"}) || (name == "help" && argc == 2)) {
    return guarded([&] {
      print_line(table_of(commands));
      return 0;
    });
  }
  if (name == "help") {
    const Command* command = find(commands, argv[2]);
    if (command == nullptr) return unknown_command(commands, argv[2]);
    std::string flag = "--help";
    char* arguments[] = {argv[2], flag.data(), nullptr};
    return run(*command, 2, arguments);
  }
  const Command* command = find(commands, name == "--version" ? "version" : name);
  if (command == nullptr) return unknown_command(commands, name);
  return run(*command, argc - 1, argv + 1);
}

}  // namespace megatron
