// A serving loop of one's own, written only on the library: prompts that come at any time share the
// steps of one engine.
//
//   serve_loop FOLDER [TOKENS] < prompts.txt
//
// Each line is a prompt. One thread reads them while the other one runs the engine; texts are
// printed as they end, with the number of their line.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "megatron/base/check.h"
#include "megatron/comm/parallel_groups.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/model_runner.h"
#include "megatron/interop/load_model.h"

namespace {

using namespace megatron;

// A text on its way.
struct Text {
  int line = 0;
  std::string prompt, output;
};

class ServeLoop {
 public:
  ServeLoop(LoadedModel& loaded, int64_t tokens)
      : tokenizer_(*loaded.tokenizer),
        ends_(loaded.end_of_text),
        tokens_(tokens),
        runner_(*loaded.model, cache()),
        engine_(runner_, nullptr, &tokenizer_, clock_) {
    if (const auto eod = tokenizer_.eod()) ends_.push_back(*eod);
    engine_.step(0);  // from now on it takes requests
  }

  void run() {
    std::thread reader([this] { read_prompts(); });
    while (!read_all_ || num_open() > 0) {
      engine_.step(10'000'000);  // waits up to 10 ms where there is nothing to do
      for (const Event& event : engine_.take_events()) tell(event);
    }
    reader.join();
    const EngineStats stats = engine_.stats();
    std::printf("%llu tokens in %llu steps\n", static_cast<unsigned long long>(stats.output_tokens),
                static_cast<unsigned long long>(stats.steps));
  }

 private:
  // Eight texts at a time, 128 blocks of 64 tokens for all of them.
  static RunnerOptions cache() {
    RunnerOptions options;
    options.slots = 8;
    options.device_blocks = 128;
    return options;
  }

  // Another thread: submit() may be called from any.
  void read_prompts() {
    std::string line;
    for (int number = 1; std::getline(std::cin, line); ++number) {
      RequestSpec spec;
      spec.prompt = tokenizer_.encode(line);
      spec.sampling.temperature = 0.0;
      spec.stop.max_tokens = tokens_;
      spec.stop.end_tokens = ends_;
      const std::lock_guard lock(mutex_);  // its first event comes after it is known here
      const Admission admission = engine_.submit(std::move(spec));
      if (admission.id)
        open_[*admission.id] = {number, line, {}};
      else
        std::printf("%d: refused: %s\n", number, admission.refusal->message.c_str());
    }
    read_all_ = true;
  }

  void tell(const Event& event) {
    const std::lock_guard lock(mutex_);
    Text& text = open_.at(event.request);
    text.output += event.text;
    if (!event.finish) return;
    std::printf("%d: %s%s [%s]\n", text.line, text.prompt.c_str(), text.output.c_str(),
                std::string(name(event.finish->reason)).c_str());
    open_.erase(event.request);
  }

  size_t num_open() {
    const std::lock_guard lock(mutex_);
    return open_.size();
  }

  const Tokenizer& tokenizer_;
  std::vector<int32_t> ends_;
  const int64_t tokens_;
  const MonotonicClock clock_;
  ModelRunner runner_;
  Engine engine_;
  std::mutex mutex_;
  std::map<RequestId, Text> open_;
  std::atomic<bool> read_all_{false};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: serve_loop FOLDER [TOKENS] < prompts.txt\n");
    return 2;
  }
  try {
    const ParallelGroups groups;
    LoadModelRequest request;
    request.load = argv[1];
    LoadedModel loaded = load_model(request, groups);
    ServeLoop(loaded, argc > 2 ? std::atoi(argv[2]) : 32).run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
