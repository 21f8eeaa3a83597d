#include "megatron/serving/generation.h"

#include <algorithm>
#include <ctime>
#include <random>

#include "megatron/base/check.h"

namespace megatron {
namespace {

constexpr int64_t kRetryNs = 20'000'000;

std::string new_id(Endpoint endpoint) {
  thread_local std::random_device device;
  std::string id = endpoint == Endpoint::kChat ? "chatcmpl-" : "cmpl-";
  constexpr char kDigits[] = "0123456789abcdef";
  for (int i = 0; i < 3; ++i) {
    uint32_t bits = device();
    for (int k = 0; k < 8; ++k, bits >>= 4) id += kDigits[bits & 15];
  }
  return id;
}

// Names for a header: those that could be no part of one are left out.
std::string header_list(const std::vector<std::string>& names) {
  constexpr size_t kMaxBytes = 1000;
  std::string out;
  for (const std::string& name : names) {
    const bool plain = name.size() <= 100 && std::all_of(name.begin(), name.end(), [](char c) {
                         return c > ' ' && c < 0x7F && c != ',';
                       });
    if (plain && out.size() + name.size() < kMaxBytes) out += (out.empty() ? "" : ", ") + name;
  }
  return out;
}

}  // namespace

// -- EventRouter

Admission EventRouter::submit(RequestSpec spec, std::shared_ptr<RunningGeneration> generation,
                              size_t prompt, int shard) {
  const int32_t choices = spec.choices;
  Admission admission = engine_.submit(std::move(spec));
  if (!admission.id) return admission;
  std::map<int, std::vector<Delivery>> deliveries;
  {
    const std::lock_guard lock(mutex_);
    routes_[*admission.id] = {std::move(generation), prompt, shard, choices};
    if (const auto early = early_.find(*admission.id); early != early_.end()) {
      std::vector<Event> events = std::move(early->second);
      early_.erase(early);
      for (Event& event : events) add(std::move(event), deliveries);
    }
    // Under the lock, so that later events cannot overtake these.
    post(std::move(deliveries));
  }
  return admission;
}

void EventRouter::add(Event event, std::map<int, std::vector<Delivery>>& deliveries) {
  const auto found = routes_.find(event.request);
  if (found == routes_.end()) {
    early_[event.request].push_back(std::move(event));
    return;
  }
  Route& route = found->second;
  const bool last = event.finish && --route.open_choices == 0;
  deliveries[route.shard].push_back({route.generation, route.prompt, std::move(event)});
  if (last) routes_.erase(found);
}

void EventRouter::post(std::map<int, std::vector<Delivery>> deliveries) {
  for (auto& [shard, list] : deliveries)
    http_.post(shard, [list = std::make_shared<std::vector<Delivery>>(std::move(list))] {
      for (Delivery& one : *list) one.generation->take(one.prompt, std::move(one.event));
    });
}

void EventRouter::deliver(std::vector<Event> events) {
  std::map<int, std::vector<Delivery>> deliveries;
  const std::lock_guard lock(mutex_);
  for (Event& event : events) add(std::move(event), deliveries);
  post(std::move(deliveries));
}

size_t EventRouter::num_open() const {
  const std::lock_guard lock(mutex_);
  return routes_.size();
}

// -- RunningGeneration

RunningGeneration::RunningGeneration(EventRouter& router, ResponseCounts& counts,
                                     const ServedModel& model, GenerationRequest request,
                                     std::shared_ptr<HttpExchange> exchange, std::string route)
    : router_(router),
      counts_(counts),
      model_(model),
      request_(std::move(request)),
      exchange_(std::move(exchange)),
      route_(std::move(route)),
      json_(request_, model_, new_id(request_.endpoint), std::time(nullptr)),
      prompt_numbers_(request_.prompts.size()),
      open_choices_(request_.prompts.size(), request_.spec.choices) {
  const int32_t each = request_.spec.choices;
  for (size_t prompt = 0; prompt < request_.prompts.size(); ++prompt)
    for (int32_t i = 0; i < each; ++i)
      choices_.emplace_back(request_, model_, static_cast<int32_t>(choices_.size()), prompt);
}

void RunningGeneration::start() {
  exchange_->on_abort([self = shared_from_this()](HttpAbort) {
    self->done_ = true;
    self->cancel_all();
  });
  submit_more();
}

void RunningGeneration::submit_more() {
  while (!done_ && next_prompt_ < request_.prompts.size()) {
    const Admission admission = router_.submit(spec_of(request_, next_prompt_), shared_from_this(),
                                               next_prompt_, exchange_->shard());
    if (admission.id) {
      ids_.push_back(*admission.id);
      ++next_prompt_;
      ++open_prompts_;
      continue;
    }
    const Refusal& refusal = *admission.refusal;
    if (refusal.kind == Refusal::Kind::kQueueFull && next_prompt_ > 0) {
      // The others of this request go on; this one waits for one of them, or a moment.
      if (open_prompts_ > 0 || waiting_) return;
      waiting_ = true;
      router_.http().post_after(exchange_->shard(), kRetryNs, [self = shared_from_this()] {
        self->waiting_ = false;
        self->submit_more();
      });
      return;
    }
    ApiError error = api_error(refusal);
    error.member = request_member(request_, error.member);
    return fail(error);
  }
  if (done_ || streaming_ || !request_.stream) return;
  streaming_ = true;
  HttpResponse response = head(200);
  response.content_type = "text/event-stream; charset=utf-8";
  response.headers.push_back({"X-Accel-Buffering", "no"});
  counts_.count(route_, 200);
  exchange_->begin(std::move(response));
}

void RunningGeneration::take(size_t prompt, Event event) {
  if (done_) return;
  if (!event.prompt_log_probabilities.empty())
    prompt_numbers_[prompt] = std::move(event.prompt_log_probabilities);
  const int32_t each = request_.spec.choices;
  take_text(choices_[prompt * static_cast<size_t>(each) + static_cast<size_t>(event.choice)],
            prompt, std::move(event));
}

void RunningGeneration::take_text(Choice& choice, size_t prompt, Event event) {
  const bool stream = request_.stream;
  std::string bytes;
  if (stream && request_.echo && !choice.begun)
    bytes = json_.echo_chunk(choice, prompt_numbers_[prompt]);
  ChoiceDelta delta = choice.take(std::move(event), /*keep=*/!stream);
  const bool numbers = request_.logprobs >= 0 || request_.return_token_ids;
  if (choice.finish && !is_complete(choice.finish->reason)) {
    if (stream && !bytes.empty()) exchange_->write(bytes);
    return fail(api_error(*choice.finish));
  }
  if (choice.finish) {
    const Usage& usage = choice.finish->usage;
    // A prompt counts once, however many texts it has.
    if (open_choices_[prompt] == request_.spec.choices) {
      usage_.prompt_tokens +=
          request_.decoder_start ? std::ssize(request_.prompts[prompt].ids) : usage.prompt_tokens;
      usage_.cached_tokens += usage.cached_tokens;
    }
    usage_.output_tokens += usage.output_tokens;
    usage_.drafts += usage.drafts;
    usage_.accepted_drafts += usage.accepted_drafts;
  }
  if (stream) {
    if (!delta.content.empty() || !delta.calls.empty() || choice.finish ||
        (numbers && !delta.tokens.empty())) {
      UsageSums sums = usage_;
      if (request_.continuous_usage && !choice.finish) {
        if (open_choices_[prompt] == request_.spec.choices)
          sums.prompt_tokens += static_cast<int64_t>(request_.prompts[prompt].ids.size());
        for (const Choice& one : choices_)
          if (!one.finish) sums.output_tokens += one.output_tokens;
      }
      bytes += json_.chunk(choice, delta, sums);
    }
    exchange_->write(bytes);
  }
  if (choice.finish) finish_choice(choice);
}

void RunningGeneration::finish_choice(Choice& choice) {
  ++finished_choices_;
  if (--open_choices_[choice.prompt] == 0) --open_prompts_;
  if (finished_choices_ == choices_.size()) return finish();
  if (next_prompt_ < request_.prompts.size()) submit_more();
}

void RunningGeneration::finish() {
  done_ = true;
  if (request_.stream) {
    exchange_->write((request_.include_usage ? json_.usage_chunk(usage_) : std::string()) +
                     ResponseJson::done_event());
    exchange_->end();
    return;
  }
  HttpResponse response = head(200);
  response.body = json_.whole(choices_, usage_, prompt_numbers_);
  respond(std::move(response));
}

void RunningGeneration::fail(const ApiError& error) {
  if (done_) return;
  done_ = true;
  cancel_all();
  const ErrorShape shape =
      request_.endpoint == Endpoint::kApi ? ErrorShape::kMegatron : ErrorShape::kOpenAi;
  if (streaming_) {
    exchange_->write(ResponseJson::error_event(error_json(error, shape)));
    exchange_->end();
    return;
  }
  respond(error_response(error, shape));
}

void RunningGeneration::cancel_all() {
  for (size_t prompt = 0; prompt < ids_.size(); ++prompt)
    if (open_choices_[prompt] > 0) router_.cancel(ids_[prompt]);
}

void RunningGeneration::respond(HttpResponse response) {
  counts_.count(route_, response.status);
  exchange_->respond(std::move(response));
}

HttpResponse RunningGeneration::head(int status) const {
  HttpResponse response{.status = status};
  response.headers.push_back({"Cache-Control", "no-store"});
  response.headers.push_back({"X-Content-Type-Options", "nosniff"});
  response.headers.push_back({"X-Request-Id", json_.id()});
  if (const std::string ignored = header_list(request_.ignored); !ignored.empty())
    response.headers.push_back({"X-Ignored-Members", ignored});
  return response;
}

}  // namespace megatron
