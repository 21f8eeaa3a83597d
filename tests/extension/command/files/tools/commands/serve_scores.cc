// megatron serve-scores: the probability of texts under a model that several ranks hold, asked for
// over a socket.
#include <csignal>
#include <memory>
#include <optional>

#include "megatron/base/check.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/comm/launch.h"
#include "megatron/inference/evaluation/scoring.h"
#include "megatron/inference/generator.h"
#include "megatron/runtime/job.h"
#include "megatron/runtime/shared_settings.h"
#include "megatron/runtime/signals.h"
#include "tools/support/line_server.h"
#include "tools/support/load_model_flags.h"
#include "tools/support/local_ranks.h"

namespace megatron {
namespace {

struct ServeConfig : Config {
  int64_t port = 0;
  int64_t num_ranks = 1;
  int64_t tensor_model_parallel_size = 1;

  void fields(FieldVisitor& v) override {
    v.group("serve-scores");
    v.field("port", port, "TCP port on the loopback address; 0: one that is free");
    v.field("num_ranks", num_ranks, "without a launcher: ranks to start on this machine");
    v.field("tensor_model_parallel_size", tensor_model_parallel_size,
            "ranks that share one copy of the model");
  }
  void validate(Violations& violations) const override {
    if (port < 0 || port > 65535) violations.add(cat("--port ", port, " is not a TCP port"));
    if (num_ranks < 1) violations.add(cat("--num-ranks ", num_ranks, " must be positive"));
    if (tensor_model_parallel_size < 1)
      violations.add(
          cat("--tensor-model-parallel-size ", tensor_model_parallel_size, " must be positive"));
  }
};

// A round of the ranks without a request: they meet often, so that none waits for long.
constexpr int kRoundMilliseconds = 1000;
// What the first rank tells the others: nothing to do, the end, or a letter and a text.
constexpr char kIdle[] = "", kEnd[] = "end";
constexpr char kText = 't';

std::string error_line(const std::string& message) {
  JsonWriter json(0);
  return json.begin_object().member("error", message).end_object().text();
}

// Every rank calls it with the same text; the ranks compute the answer together.
std::string score_text(const LoadedModel& loaded, const ParallelGroups& groups,
                       const std::string& text) {
  const std::vector<int32_t> ids = loaded.tokenizer->encode(text);
  if (ids.size() < 2) return error_line("a text needs at least two tokens");
  const int64_t limit = max_positions(loaded.config);
  if (limit >= 0 && static_cast<int64_t>(ids.size()) - 1 > limit)
    return error_line(cat(ids.size(), " tokens are beyond the model's ", limit, " positions"));
  const ScoreRequest request{ids, static_cast<int64_t>(ids.size()) - 1};
  const Score result = score(*loaded.model, groups, {&request, 1}).front();
  JsonWriter json(0);
  return json.begin_object()
      .member("tokens", request.num_scored)
      .member("logprob", result.logprob)
      .member("greedy", result.greedy)
      .end_object()
      .text();
}

int serve(const ServeConfig& config, const LoadModelConfig& load, const Job& job) {
  const LoadedModel loaded = load_model(load, job.groups, /*tokenizer_required=*/true,
                                        job.local_rank, job.local_world_size, job.agreement);
  const SignalHandler signals(SIGTERM);
  Agreement alone;
  Agreement& ranks = job.agreement != nullptr ? *job.agreement : alone;
  std::unique_ptr<LineServer> server;
  if (job.is_first()) {
    server = std::make_unique<LineServer>(static_cast<int>(config.port));
    print_line(cat("listening on 127.0.0.1:", server->port()));
  }
  for (;;) {
    std::string order = kIdle;
    if (server && signals.received() != 0) {
      order = kEnd;
    } else if (server) {
      if (const auto line = server->next(kRoundMilliseconds)) order = kText + *line;
    }
    order = ranks.broadcast(order);
    if (order == kEnd) break;
    if (order == kIdle) continue;
    const std::string line = score_text(loaded, job.groups, order.substr(1));
    if (server) server->answer(line);
  }
  job.groups.world.barrier();
  return 0;
}

}  // namespace

extern "C" int megatron_serve_scores(int argc, char** argv) {
  LoadModelConfig load;
  ServeConfig config;
  Config* const configs[] = {&load, &config};
  if (parse_flags(configs, argc, argv, {.positional = "load"}).help) {
    print_line(help_text("megatron serve-scores DIR --port N [flags]", configs));
    return 0;
  }
  const Launch launch = launch_from_environment();
  RuntimeOptions options;
  options.parallel.tensor_model_parallel_size = config.tensor_model_parallel_size;
  options.settings = [&] { return shared_settings(configs); };
  if (launch.world_size == 1 && config.num_ranks > 1) {
    data_parallel_size(options.parallel, config.num_ranks);  // the ranks divide
    return run_local_ranks(static_cast<int>(config.num_ranks), argc, argv);
  }
  data_parallel_size(options.parallel, launch.world_size);
  if (launch.world_size > 1)
    options.device = load_model_request(load, launch.local_rank).device.is_cuda()
                         ? DeviceChoice::kCuda
                         : DeviceChoice::kCpu;
  return run_job(launch, options, [&](const Job& job) { return serve(config, load, job); });
}

}  // namespace megatron
