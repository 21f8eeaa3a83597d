#include "megatron/reporting/log_line.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <ctime>

#include "megatron/base/format.h"

namespace megatron {

namespace {

[[gnu::format(printf, 2, 3)]] void append(std::string& out, const char* format, ...) {
  char buffer[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  out += buffer;
}

void append_time(std::string& out, std::chrono::system_clock::time_point time) {
  using std::chrono::duration_cast;
  const auto since = time.time_since_epoch();
  const std::time_t seconds = duration_cast<std::chrono::seconds>(since).count();
  const long micros = duration_cast<std::chrono::microseconds>(since).count() % 1'000'000;
  std::tm parts{};
  localtime_r(&seconds, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts);
  append(out, " [%s.%06ld]", text, micros);
}

}  // namespace

std::string format_training_line(const TrainingLine& line) {
  const auto integer = [](int64_t value) { return static_cast<long long>(value); };
  std::string out;
  append_time(out, line.time);
  append(out, " iteration %8lld/%8lld |", integer(line.iteration), integer(line.train_iters));
  append(out, " consumed samples: %12lld |", integer(line.consumed_samples));
  if (line.skipped_samples > 0)
    append(out, " skipped samples: %12lld |", integer(line.skipped_samples));
  append(out, " elapsed time per iteration (ms): %.1f |", line.ms_per_iteration);
  if (line.tflops_per_gpu)
    append(out, " throughput per GPU (TFLOP/s/GPU): %.1f |", *line.tflops_per_gpu);
  append(out, " learning rate: %.6E |", line.learning_rate);
  append(out, " global batch size: %5lld |", integer(line.global_batch_size));
  for (const auto& [name, value] : line.losses)
    if (!(value < 0)) append(out, " %s: %.6E |", name.c_str(), value);
  for (const auto& [name, value] : line.metrics) append(out, " %s: %.6E |", name.c_str(), value);
  append(out, " loss scale: %.1f |", line.loss_scale);
  if (line.grad_norm) append(out, " grad norm: %.3f |", *line.grad_norm);
  if (line.num_zeros) append(out, " num zeros: %lld |", integer(*line.num_zeros));
  if (line.params_norm) append(out, " params norm: %.3f |", *line.params_norm);
  append(out, " number of skipped iterations: %3lld |", integer(line.skipped_iterations));
  append(out, " number of nan iterations: %3lld |", integer(line.nan_iterations));
  if (line.tokens_per_second) append(out, " tokens per second: %.1f |", *line.tokens_per_second);
  if (line.seconds_left) append(out, " ETA: %s |", format_duration(*line.seconds_left).c_str());
  return out;
}

double perplexity(double loss) { return std::exp(std::min(20.0, loss)); }

std::string format_evaluation_lines(const EvaluationLine& line) {
  std::string text = " validation" + line.set_suffix + " loss at " + line.where + " | ";
  for (const auto& [name, value] : line.losses) {
    append(text, "%s value: %.6E | ", name.c_str(), value);
    if (line.perplexity) append(text, "%s PPL: %.6E | ", name.c_str(), perplexity(value));
  }
  for (const auto& [name, value] : line.metrics)
    append(text, "%s value: %.6E | ", name.c_str(), value);
  const std::string dashes(text.size() + 1, '-');
  return dashes + "\n" + text + "\n" + dashes;
}

}  // namespace megatron
