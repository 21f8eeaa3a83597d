// The text of the training and evaluation log lines, character by character as Megatron-LM prints
// them, because tools parse them. Our own fields come after Megatron-LM's.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace megatron {

struct TrainingLine {
  std::chrono::system_clock::time_point time;
  int64_t iteration = 0;
  int64_t train_iters = 0;
  int64_t consumed_samples = 0;
  int64_t skipped_samples = 0;
  double ms_per_iteration = 0;
  std::optional<double> tflops_per_gpu;  // --log-throughput
  double learning_rate = 0;
  int64_t global_batch_size = 0;
  // "lm loss", ...; negative ones are not printed
  std::vector<std::pair<std::string, double>> losses;
  std::vector<std::pair<std::string, double>> metrics;  // task metrics, if any
  double loss_scale = 1;
  std::optional<double> grad_norm;  // absent after a skipped step
  std::optional<int64_t> num_zeros;
  std::optional<double> params_norm;
  int64_t skipped_iterations = 0;
  int64_t nan_iterations = 0;
  std::optional<double> tokens_per_second;  // over all ranks
  // Other things read, such as images, over all ranks
  std::vector<std::pair<std::string, double>> per_second;
  std::optional<double> seconds_left;  // until the end of training at this speed
};

// With the local time in microseconds.
std::string format_training_line(const TrainingLine& line);

struct EvaluationLine {
  std::string set_suffix;  // "", "-1" or "-books": which of several validation sets
  std::string where;       // "iteration 100", "iteration 100 on validation set"
  std::vector<std::pair<std::string, double>> losses;
  std::vector<std::pair<std::string, double>> metrics = {};
  bool perplexity = true;  // print the perplexity of each loss (losses are per token)
};

// exp(min(20, loss)).
double perplexity(double loss);

// Three lines, framed by dashes, joined by newlines.
std::string format_evaluation_lines(const EvaluationLine& line);

}  // namespace megatron
