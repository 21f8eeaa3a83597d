// megatron report RUN_DIR: curves and figures of a training run as one HTML page.
#include "megatron/training/report.h"

#include <filesystem>
#include <string>

#include "megatron/base/files.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "tools/commands.h"

namespace megatron {

namespace {

struct ReportConfig : Config {
  std::string run_dir;
  std::string output;
  bool log_loss = false;
  bool json = false;

  void fields(FieldVisitor& visitor) override {
    visitor.group("report");
    visitor.field({"run_dir", "--load --run-dir"}, run_dir, "folder of the run: --save or --run-dir of pretrain");
    visitor.field("output", output, "HTML file to write; default: report.html in the folder of the run");
    visitor.field("log_loss", log_loss, "logarithmic axis of the loss");
    visitor.field("json", json, "print a summary as JSON; no page is written unless --output is given");
  }
  void validate(Violations& violations) const override {
    if (run_dir.empty()) violations.add("no folder of a run is given", "megatron report RUN_DIR");
  }
};

}  // namespace

int report(int argc, char** argv) {
  ReportConfig config;
  Config* configs[] = {&config};
  ParseOptions options;
  options.positional = "run_dir";
  if (parse_flags(configs, argc, argv, options).help) {
    print_line(help_text("megatron report RUN_DIR [--output FILE] [--log-loss] [--json]", configs));
    return 0;
  }
  const RunHistory run = read_run(config.run_dir);
  if (run.unreadable_lines > 0)
    log_warning(std::to_string(run.unreadable_lines) + " lines of the metrics cannot be read and were left out");
  if (config.json) print_line(report_json(run));
  if (config.json && config.output.empty()) return 0;
  const std::filesystem::path folder =
      std::filesystem::is_directory(config.run_dir) ? std::filesystem::path(config.run_dir) : std::filesystem::path(config.run_dir).parent_path();
  const std::filesystem::path output = config.output.empty() ? folder / "report.html" : std::filesystem::path(config.output);
  write_file_atomically(output, render_report(run, {std::filesystem::absolute(config.run_dir).lexically_normal().string(), config.log_loss}));
  if (!config.json) print_line("wrote " + output.string());
  return 0;
}

}  // namespace megatron
