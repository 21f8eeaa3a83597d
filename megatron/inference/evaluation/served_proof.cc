#include "megatron/inference/evaluation/served_proof.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

#include "megatron/base/check.h"
#include "megatron/inference/engine.h"
#include "megatron/inference/generator.h"
#include "megatron/inference/model_runner.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kProofBlock = 4;  // positions
constexpr int32_t kProofSlots = 4;
constexpr int64_t kProofOutputs = 5;
constexpr int64_t kProofWaitNs = 60'000'000'000;
constexpr int64_t kProofPollNs = 1'000'000;

RunnerOptions proof_runner(int64_t positions) {
  RunnerOptions options;
  options.slots = kProofSlots;
  options.block_size = kProofBlock;
  // Two of the longest texts and a little more, so that others wait.
  options.device_blocks =
      static_cast<int32_t>(2 * ((positions + kProofBlock - 1) / kProofBlock) + 3);
  return options;
}

EngineOptions proof_engine() {
  EngineOptions options;
  options.scheduler.max_step_tokens = 7;
  options.step_timeout_ns = kProofWaitNs;
  options.check_invariants = true;
  return options;
}

// What the engine tells of the requests of one wave.
class Wave {
 public:
  Wave(Engine& engine, const std::vector<RequestSpec>& specs) : engine_(engine) {
    for (const RequestSpec& spec : specs) {
      const Admission admission = engine.submit(spec);
      MEGATRON_CHECK(admission.id, "a request of the proof: ", admission.refusal->message);
      places_[*admission.id] = texts_.size();
      texts_.emplace_back().spec = spec;
    }
  }

  std::vector<ServedText> run() {
    while (!places_.empty()) {
      engine_.step(kProofWaitNs);
      for (Event& event : engine_.take_events()) take(std::move(event));
    }
    return std::move(texts_);
  }

 private:
  void take(Event event) {
    ServedText& text = texts_[places_.at(event.request)];
    for (GeneratedToken& token : event.tokens) {
      text.tokens.push_back(token.id);
      if (token.log_probabilities) text.output.push_back(std::move(*token.log_probabilities));
    }
    if (!event.prompt_log_probabilities.empty())
      text.prompt = std::move(event.prompt_log_probabilities);
    if (!event.finish) return;
    MEGATRON_CHECK(is_complete(event.finish->reason), "a text of the proof ended with ",
                   name(event.finish->reason), ": ", event.finish->message);
    text.finish = std::move(*event.finish);
    places_.erase(event.request);
  }

  Engine& engine_;
  std::map<RequestId, size_t> places_;
  std::vector<ServedText> texts_;
};

// Natural logarithms of the probabilities of each id, by how much of a text is known.
class TrainedText {
 public:
  // `input`: what the encoder of an encoder-decoder reads.
  TrainedText(Model& model, std::vector<int32_t> ids, std::vector<int32_t> input)
      : model_(model), ids_(std::move(ids)), input_(std::move(input)) {
    const TransformerConfig& t = model.config().transformer;
    if (t.rope_scaling_type == RopeScaling::kLongRope)
      border_ = t.rope_original_max_position_embeddings;
  }

  // After the first `count` ids, `known` of which were known when they were computed. Longrope
  // rotates by the latter.
  at::Tensor after(int64_t count, int64_t known) {
    const auto length = static_cast<int64_t>(ids_.size());
    const int64_t end = known <= border_ ? std::min(border_, length) : length;
    at::Tensor& table = tables_[end];
    if (!table.defined())
      table = at::log_softmax(
          full_logits(model_, std::span(ids_).first(static_cast<size_t>(end)), input_)
              .to(at::kDouble),
          -1);
    return table[count - 1];
  }

 private:
  Model& model_;
  std::vector<int32_t> ids_, input_;
  int64_t border_ = 0;
  std::map<int64_t, at::Tensor> tables_;  // [end, v]
};

class ServedComparer {
 public:
  ServedComparer(Model& model, double band) : model_(model), band_(band) {}

  void add(const ServedText& text, size_t number) {
    std::vector<int32_t> ids = text.spec.prompt;
    ids.insert(ids.end(), text.tokens.begin(), text.tokens.end());
    TrainedText trained(
        model_, ids, text.spec.state_input ? text.spec.state_input->ids : std::vector<int32_t>());
    const auto prompt = static_cast<int64_t>(text.spec.prompt.size());
    const int64_t from = std::max<int64_t>(1, text.spec.log_probabilities.prompt_from);
    for (size_t i = 0; i < text.prompt.size(); ++i) {
      const int64_t position = from + static_cast<int64_t>(i);
      compare(trained.after(position, prompt), text.prompt[i],
              cat("text ", number, ", position ", position, " of the prompt"));
    }
    for (size_t i = 0; i < text.tokens.size(); ++i) {
      const int64_t known = prompt + static_cast<int64_t>(i);
      const at::Tensor row = trained.after(known, known);
      const std::string where = cat("text ", number, ", position ", known);
      if (i < text.output.size()) compare(row, text.output[i], where);
      if (text.spec.sampling.temperature == 0.0)
        note(result_.greedy_tokens, (row.max() - row[text.tokens[i]]).item<double>(),
             band_ * magnitude(row.max()), where);
    }
    result_.cached_tokens += text.finish.usage.cached_tokens;
  }
  const ServedComparison& result() const { return result_; }

 private:
  static double magnitude(const at::Tensor& value) {
    return std::max(1.0, std::abs(value.item<double>()));
  }

  void compare(const at::Tensor& row, const PositionLogProbabilities& told,
               const std::string& where) {
    const auto one = [&](const TokenLogProbability& token) {
      const at::Tensor expected = row[token.id];
      note(result_.log_probabilities,
           std::abs(expected.item<double>() - static_cast<double>(token.log_probability)),
           band_ * magnitude(expected), cat(where, ", id ", token.id));
    };
    one(told.chosen);
    for (const TokenLogProbability& token : told.top) one(token);
  }

  static void note(ServedComparison::Line& line, double difference, double allowed,
                   const std::string& where) {
    ++line.compared;
    const bool fails = !(difference <= allowed);  // NaN fails
    const bool first_to_fail = fails && line.failed == 0;
    line.failed += fails ? 1 : 0;
    if (line.compared > 1 && !first_to_fail &&
        (line.failed > 0 || difference / allowed <= line.difference / line.allowed))
      return;
    line.difference = difference;
    line.allowed = allowed;
    line.worst = where;
  }

  Model& model_;
  const double band_;
  ServedComparison result_;
};

}  // namespace

ServedWorkload served_workload(int64_t vocab_size, int64_t positions, uint32_t seed,
                               int64_t input_tokens) {
  std::mt19937 random(seed);
  const auto number = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto ids = [&](int64_t count) {
    std::vector<int32_t> result;
    while (static_cast<int64_t>(result.size()) < count)
      result.push_back(static_cast<int32_t>(number(0, vocab_size - 1)));
    return result;
  };
  const int64_t longest = positions - kProofOutputs;
  ServedWorkload workload{{}, positions};
  std::vector<int32_t> shared = ids(longest);
  for (int wave = 0; wave < 2; ++wave) {
    std::vector<RequestSpec> specs;
    for (int i = 0; i < 5; ++i) {
      RequestSpec spec;
      // The longest one; beginnings of it, with the same end or another one; others.
      spec.prompt = i == 4 ? ids(number(1, longest)) : shared;
      if (i > 0 && i < 4) spec.prompt.resize(static_cast<size_t>(number(longest / 2, longest)));
      if (i == 2) spec.prompt.back() = static_cast<int32_t>(number(0, vocab_size - 1));
      spec.sampling.temperature = i % 2 == 0 ? 0.0 : 1.0;
      spec.sampling.seed = static_cast<uint64_t>(wave * 5 + i);
      spec.stop.max_tokens = kProofOutputs;
      spec.log_probabilities.output_top = static_cast<int32_t>(std::min<int64_t>(i, vocab_size));
      // Log-probabilities of a prompt keep its cached prefix from being used.
      if (wave == 0 || i == 4) {
        spec.log_probabilities.prompt_top = i % 2;
        spec.log_probabilities.prompt_from = i == 3 ? longest / 2 - 1 : 0;
      }
      if (input_tokens > 0)
        spec.state_input = std::make_shared<const StateInput>(
            StateInput{ids(i == 0 ? input_tokens : number(1, input_tokens)), {}, {}});
      specs.push_back(std::move(spec));
    }
    workload.waves.push_back(std::move(specs));
  }
  return workload;
}

std::vector<ServedText> serve_workload(Model& model, const ServedWorkload& workload,
                                       LocalLinks& links, int rank) {
  const MonotonicClock clock;
  ModelRunner runner(model, proof_runner(workload.positions));
  if (rank > 0) {
    LocalLink link(links, rank);
    follow(link, runner, clock, {.silence_ns = kProofWaitNs, .build = {}});
    return {};
  }
  Engine engine(runner, links.num_ranks() > 1 ? &links : nullptr, nullptr, clock, proof_engine());
  while (engine.step(0).state == EngineState::kStarting) {
  }
  std::vector<ServedText> texts;
  for (const std::vector<RequestSpec>& specs : workload.waves)
    for (ServedText& text : Wave(engine, specs).run()) texts.push_back(std::move(text));
  engine.command(DrainCommand{}, kProofWaitNs);
  while (engine.step(kProofPollNs).state != EngineState::kStopped) {
  }
  return texts;
}

ServedComparison compare_served(Model& model, std::span<const ServedText> texts, double band) {
  ServedComparer comparer(model, band);
  for (size_t i = 0; i < texts.size(); ++i) comparer.add(texts[i], i);
  return comparer.result();
}

}  // namespace megatron
