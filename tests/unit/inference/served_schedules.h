// Random schedules of an engine on real models: whatever makes room for whatever, however often the
// cache and the weights leave, each request gets the tokens that it gets alone.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "megatron/inference/adapters.h"
#include "megatron/scheduling/request.h"
#include "tests/unit/inference/served_models.h"

namespace megatron {

// How often what a schedule may have has come.
using Counts = std::map<std::string, int64_t>;

// Where models compute, and what a request gets alone.
struct ScheduledPlace {
  at::Device device = at::kCPU;
  at::ScalarType type = at::kDouble;
  // From a runner that serves nothing else, with adapters as the server has them, in every bit.
  // Else from forwards over the whole of its text without a cache, with adapters that are merged
  // into the weights.
  bool alone_by_runner = false;
  int stretch = 1;  // prompts and steps are so many times as long
};

// A model on which schedules run, requests for it, and what each of them gets alone.
class ScheduledModel {
 public:
  ScheduledModel(std::string name, const std::function<std::unique_ptr<Model>()>& make,
                 const ScheduledPlace& place = {});
  // A checkpoint of Hugging Face with two adapters for requests: one, and the same with a larger
  // lora_alpha.
  ScheduledModel(std::string name, LoadModelRequest base, const std::filesystem::path& adapter,
                 const ParallelGroups& one, const ScheduledPlace& place = {});
  ~ScheduledModel();

  const std::string& name() const { return name_; }
  const ScheduledPlace& place() const { return place_; }
  Model& model() { return model_; }
  ServedWeights& weights() { return weights_; }
  const AdapterList* adapters() const { return adapters_.empty() ? nullptr : &adapters_; }
  // A model that drafts for it: nearly its weights. Null: there is none.
  Served* drafting() { return drafting_.get(); }
  bool is_toy() const;
  int64_t longest() const { return int64_t{48} * place_.stretch; }  // tokens of a request

  static constexpr int kRequests = 100;
  const RequestSpec& request(int index);
  // All that a choice gets.
  const DrivenSequence& alone(int index, int32_t choice);

 private:
  void keep_values();
  void make_drafting(std::unique_ptr<Model> model);
  at::Tensor logits(const RequestSpec& spec, const std::vector<int32_t>& ids);
  DrivenSequence by_runner(const DrivenSequence& given);
  RequestSpec draw_request(int index);

  const std::string name_;
  const ScheduledPlace place_;
  std::vector<at::Tensor> first_values_, drafting_values_;
  std::unique_ptr<Served> twin_;  // stays where it is
  std::unique_ptr<Served> served_;
  std::unique_ptr<Served> drafting_;
  // Without an adapter, with each merged into it; the one that is served
  std::vector<LoadedModel> loaded_;
  AdapterList adapters_, twin_adapters_;
  std::unique_ptr<ServedWeights> loaded_weights_;
  Model& model_;
  ServedWeights& weights_;
  std::map<int, RequestSpec> requests_;
  std::map<std::pair<int, int32_t>, DrivenSequence> given_alone_;
};

// Plays one schedule, and expects what is said above. Counts what it had.
void play_schedule(ScheduledModel& model, uint32_t seed, Counts& counts);

}  // namespace megatron
