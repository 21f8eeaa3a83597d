// megatron report RUN_DIR...: curves and figures of training runs as one HTML page.
#include "megatron/reporting/report.h"

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"

namespace megatron {

namespace {

struct ReportConfig : Config {
  std::vector<std::string> run_dir;
  std::string output;
  bool log_loss = false;
  bool json = false;

  void fields(FieldVisitor& visitor) override {
    visitor.group("report");
    visitor.field({"run_dir", "--load --run-dir"}, run_dir,
                  "folders of runs: --save or --run-dir of pretrain; several are compared");
    visitor.field("output", output,
                  "HTML file to write; default: report.html in the folder of the run, or here when "
                  "there are several");
    visitor.field("log_loss", log_loss, "logarithmic axis of the loss");
    visitor.field("json", json,
                  "print a summary as JSON; no page is written unless --output is given");
  }
  void validate(Violations& violations) const override {
    if (run_dir.empty())
      violations.add("no folder of a run is given", "megatron report RUN_DIR...");
  }
};

// Runs whose folders have the same name are named by their full paths.
std::vector<RunHistory> read_runs(const std::vector<std::string>& folders) {
  std::vector<RunHistory> runs;
  std::map<std::string, int> uses;
  for (const std::string& folder : folders) {
    runs.push_back(read_run(folder));
    ++uses[runs.back().name];
    if (runs.back().unreadable_lines > 0)
      log_warning(cat(folder, ": ", runs.back().unreadable_lines,
                      " lines of the metrics cannot be read and were skipped"));
  }
  for (size_t i = 0; i < runs.size(); ++i)
    if (uses[runs[i].name] > 1) runs[i].name = folders[i];
  return runs;
}

std::string json_of(const std::vector<RunHistory>& runs) {
  JsonWriter json;
  json.begin_object();
  for (const RunHistory& run : runs) json.key(run.name).raw(report_json(run));
  return json.end_object().text();
}

std::filesystem::path default_output(const std::vector<std::string>& folders) {
  if (folders.size() > 1) return "report.html";
  const std::filesystem::path folder = folders.front();
  return (std::filesystem::is_directory(folder) ? folder : folder.parent_path()) / "report.html";
}

}  // namespace

int report(int argc, char** argv) {
  ReportConfig config;
  Config* configs[] = {&config};
  if (!parse_or_help("megatron report RUN_DIR... [--output FILE] [--log-loss] [--json]", configs,
                     argc, argv, {.positional = "run_dir"}))
    return 0;
  const std::vector<RunHistory> runs = read_runs(config.run_dir);
  if (config.json) print_line(runs.size() == 1 ? report_json(runs.front()) : json_of(runs));
  if (config.json && config.output.empty()) return 0;
  const std::filesystem::path output =
      config.output.empty() ? default_output(config.run_dir) : std::filesystem::path(config.output);
  const std::string title = listed(config.run_dir, [](const std::string& folder) {
    return std::filesystem::absolute(folder).lexically_normal().string();
  });
  write_file_atomically(output, render_report(runs, {title, config.log_loss}));
  if (!config.json) print_line("wrote " + output.string());
  return 0;
}

}  // namespace megatron
