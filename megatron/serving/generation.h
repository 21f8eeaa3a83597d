// One request for text on its way: from the engine's events to the bytes of its response.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "megatron/serving/api_error.h"
#include "megatron/serving/http/http_exchange.h"
#include "megatron/serving/http/http_server.h"
#include "megatron/serving/response_json.h"
#include "megatron/serving/server_metrics.h"
#include "megatron/serving/service.h"

namespace megatron {

class RunningGeneration;

// Leads events from the engine's thread to the generations that wait for them, each on the I/O
// thread of its connection; a step's events of one thread travel together.
class EventRouter {
 public:
  EventRouter(EngineService& engine, HttpServer& http) : engine_(engine), http_(http) {}

  // Any thread; events come on the I/O thread `shard`.
  Admission submit(RequestSpec spec, std::shared_ptr<RunningGeneration> generation, size_t prompt,
                   int shard);
  void cancel(RequestId request) { engine_.cancel(request); }
  // The engine's thread.
  void deliver(std::vector<Event> events);
  HttpServer& http() { return http_; }
  size_t num_open() const;  // requests whose last event has not come

 private:
  struct Route {
    std::shared_ptr<RunningGeneration> generation;
    size_t prompt = 0;
    int shard = 0;
    int32_t open_choices = 0;
  };
  struct Delivery {
    std::shared_ptr<RunningGeneration> generation;
    size_t prompt = 0;
    Event event;
  };
  void add(Event event, std::map<int, std::vector<Delivery>>& deliveries);
  void post(std::map<int, std::vector<Delivery>> deliveries);

  EngineService& engine_;
  HttpServer& http_;
  mutable std::mutex mutex_;
  std::map<RequestId, Route> routes_;
  std::map<RequestId, std::vector<Event>> early_;  // of requests that submit() is about to add
};

// Everything but the constructor is called on the I/O thread of the exchange.
class RunningGeneration : public std::enable_shared_from_this<RunningGeneration> {
 public:
  RunningGeneration(EventRouter& router, ResponseCounts& counts, const ServedModel& model,
                    GenerationRequest request, std::shared_ptr<HttpExchange> exchange,
                    std::string route);

  // Asks the engine for the first prompts.
  void start();
  void take(size_t prompt, Event event);

 private:
  void submit_more();
  void take_text(Choice& choice, size_t prompt, Event event);
  void finish_choice(Choice& choice);
  void finish();
  void fail(const ApiError& error);
  void cancel_all();
  void respond(HttpResponse response);
  HttpResponse head(int status) const;

  EventRouter& router_;
  ResponseCounts& counts_;
  const ServedModel& model_;
  const GenerationRequest request_;
  const std::shared_ptr<HttpExchange> exchange_;
  const std::string route_;
  ResponseJson json_;

  std::vector<Choice> choices_;
  std::vector<std::vector<PositionLogProbabilities>> prompt_numbers_;  // by prompt
  std::vector<int32_t> open_choices_;                                  // by prompt
  std::vector<RequestId> ids_;                                         // by prompt submitted
  size_t next_prompt_ = 0;  // the first that is not submitted
  size_t open_prompts_ = 0, finished_choices_ = 0;
  UsageSums usage_;
  bool waiting_ = false;  // for room in the engine's queue
  bool streaming_ = false, done_ = false;
};

}  // namespace megatron
