// One sequence or several through the runner, for benchmarks/decode_peers.py: reads lines "PROMPT
// TOKENS SEQUENCES" from standard input and answers each with the seconds of the prompts and of the
// tokens. Greedy; ids are random; no tokenizer.
//
//   bench_decode FOLDER THREADS [int8]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string_view>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/model_runner.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void wait_for_step(ModelRunner& runner) {
  MEGATRON_CHECK(runner.take(int64_t{600'000'000'000}), "a step took ten minutes");
}

// Plans of the prompts in one step, then of one token each.
void run(Model& model, ServedWeights& weights, int64_t prompt, int64_t tokens, int32_t sequences) {
  RunnerOptions options;
  options.slots = sequences;
  const auto blocks =
      static_cast<int32_t>((prompt + tokens + options.block_size - 1) / options.block_size);
  options.device_blocks = blocks * sequences;
  ModelRunner runner(model, weights, options);
  std::mt19937 random(1);
  std::uniform_int_distribution<int32_t> id(0, static_cast<int32_t>(model.config().vocab_size) - 1);
  StepPlan plan;
  plan.step = 1;
  for (int32_t slot = 0; slot < sequences; ++slot) {
    SlotStart start;
    start.slot = slot;
    start.prompt_length = prompt;
    start.sampling.temperature = 0.0;
    for (int64_t i = 0; i < prompt; ++i) start.ids.push_back(id(random));
    BlockChange change{slot, 0, {}};
    for (int32_t i = 0; i < blocks; ++i) change.appended.push_back(slot * blocks + i);
    plan.blocks.push_back(std::move(change));
    plan.parts.push_back({slot, 0, static_cast<int32_t>(prompt), prompt, 0, 0, true});
    plan.tokens.insert(plan.tokens.end(), start.ids.begin(), start.ids.end());
    plan.starts.push_back(std::move(start));
  }
  const double begin = seconds();
  runner.launch(plan);
  wait_for_step(runner);
  const double middle = seconds();
  for (int64_t i = 1; i < tokens; ++i) {
    StepPlan step;
    step.step = i + 1;
    for (int32_t slot = 0; slot < sequences; ++slot)
      step.parts.push_back({slot, prompt + i - 1, 1, prompt + i, 0, 0, true});
    step.tokens.assign(static_cast<size_t>(sequences), kLastSampled);
    runner.launch(step);
    wait_for_step(runner);
  }
  std::printf("%.6f %.6f\n", middle - begin, seconds() - middle);
  std::fflush(stdout);
}

int main(const char* folder, int threads, bool int8) {
  at::set_num_threads(threads);
  const ParallelGroups groups;
  LoadModelRequest request;
  request.load = folder;
  request.dtype = at::kFloat;
  request.tokenizer_required = false;
  request.int8 = int8;
  const LoadedModel loaded = load_model(request, groups);
  ServedWeights weights(*loaded.store, {}, "");
  int64_t prompt = 0, tokens = 0;
  int32_t sequences = 0;
  while (std::cin >> prompt >> tokens >> sequences)
    run(*loaded.model, weights, prompt, tokens, sequences);
  return 0;
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  const bool int8 = argc == 4 && std::string_view(argv[3]) == "int8";
  if (argc != 3 && !int8) {
    std::fprintf(stderr, "usage: bench_decode FOLDER THREADS [int8]\n");
    return 2;
  }
  try {
    return megatron::main(argv[1], std::atoi(argv[2]), int8);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
