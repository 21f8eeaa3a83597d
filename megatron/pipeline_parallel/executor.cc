#include "megatron/pipeline_parallel/executor.h"

#include <memory>
#include <numeric>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// A link is a group of two; its sender has rank 0.
constexpr int kSender = 0;
constexpr int kReceiver = 1;

// A buffer [ranks, ...] for an all-gather of `tensor` over the group.
at::Tensor memory_for_all(const at::Tensor& tensor, const ProcessGroup& group) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), group.size());
  return at::empty(shape, tensor.options());
}

class Executor {
 public:
  Executor(const Schedule& schedule, const std::vector<ActionTransfers>& transfers,
           StageCompute& stage, const PipelineLinks& links, at::Device device)
      : schedule_(schedule),
        actions_(schedule.stages.at(static_cast<size_t>(links.stage()))),
        stage_(stage),
        links_(links),
        device_(device),
        transfers_(transfers) {
    for (size_t i = 0; i < transfers_.size(); ++i) {
      const Transfer& receive = transfers_[i].receive;
      if (!receive.any()) continue;
      Incoming& from = incoming_[receive.peer];
      if (from.user.size() <= static_cast<size_t>(receive.sequence))
        from.user.resize(static_cast<size_t>(receive.sequence) + 1);
      from.user[static_cast<size_t>(receive.sequence)] = i;
    }
    arrivals_.resize(actions_.size());
    if (!schedule.vocab_parallel) return;
    hidden_calls_ = hidden_calls(schedule, links.stage(), links.overlap());
    hidden_.resize(static_cast<size_t>(schedule.num_microbatches));
    statistics_.resize(hidden_.size());
    hidden_grads_.resize(hidden_.size());
  }

  void run() {
    for (size_t i = 0; i < actions_.size(); ++i) {
      post_receive(i);
      if (links_.overlap()) post_receive(early_receiver(transfers_, links_.stage(), i));
      if (schedule_.vocab_parallel)
        for (const int microbatch : hidden_calls_[i]) share_hidden(microbatch);
      const StageTensors input = schedule_.vocab_parallel && takes_joint(actions_[i])
                                     ? StageTensors{take_joint(actions_[i])}
                                     : take(i);
      const StageTensors result = compute(actions_[i], input);
      if (schedule_.vocab_parallel && gives_joint(actions_[i]))
        give_joint(actions_[i], result);
      else
        send(i, result);
    }
    wait_for_sends();
    wait_for_gradients();
  }

 private:
  using Works = std::vector<std::shared_ptr<Work>>;
  struct Arrival {
    StageTensors tensors;
    Works works;  // of each tensor; empty: passed in memory
  };
  // Of a collective.
  struct Joint {
    at::Tensor tensor;
    std::shared_ptr<Work> work;
  };
  // Messages from one peer.
  struct Incoming {
    std::vector<size_t> user;  // by sequence: the action that uses the message
    size_t posted = 0;         // messages whose receives are posted
  };
  struct Outgoing {
    int peer;
    int used_at;  // the peer's action that uses it
    StageTensors tensors;
    Works works;
  };

  static void wait(const Works& works) {
    for (const std::shared_ptr<Work>& work : works) work->wait();
  }
  bool crosses(const Transfer& transfer) const {
    return transfer.any() && transfer.peer != links_.stage();
  }

  // Posts the receive of the action's input, after those of earlier messages on the same link. Does
  // nothing past the last action.
  void post_receive(size_t i) {
    if (i >= actions_.size() || !crosses(transfers_[i].receive)) return;
    const Transfer& receive = transfers_[i].receive;
    Incoming& from = incoming_[receive.peer];
    for (; from.posted <= static_cast<size_t>(receive.sequence); ++from.posted) {
      const size_t user = from.user[from.posted];
      Arrival& arrival = arrivals_[user];
      for (const TensorFormat& format : received(actions_[user])) {
        const at::Tensor& tensor = arrival.tensors.emplace_back(empty(format));
        if (tensor.numel() == 0) continue;  // nobody sends it
        arrival.works.push_back(links_.from(receive.peer).recv(tensor, kSender));
      }
    }
  }

  // Waits for the action's input and returns it; empty at the ends of the model.
  StageTensors take(size_t i) {
    const Transfer& receive = transfers_[i].receive;
    if (!receive.any()) return {};
    Arrival arrival = std::exchange(arrivals_[i], {});
    MEGATRON_ASSERT(arrival.tensors.size() == received(actions_[i]).size(), "the input of ",
                    to_string(actions_[i]), " on stage ", links_.stage(), " is not there");
    wait(arrival.works);
    release_sends(receive);
    return std::move(arrival.tensors);
  }

  StageTensors compute(const Action& action, const StageTensors& input) {
    switch (action.kind) {
      case Action::Kind::kForward:
        return stage_.forward(action.chunk, action.microbatch, input);
      case Action::Kind::kBackward:
        return stage_.backward(action.chunk, action.microbatch, input, false);
      case Action::Kind::kBackwardInput:
        return stage_.backward(action.chunk, action.microbatch, input, true);
      case Action::Kind::kBackwardWeight:
        stage_.weight_backward(action.chunk, action.microbatch);
        break;
      case Action::Kind::kHead:
        return {stage_.head(action.microbatch, input.front())};
      case Action::Kind::kLoss:
        return {stage_.loss(action.microbatch, input.front())};
    }
    return {};
  }

  void send(size_t i, const StageTensors& result) {
    const Transfer& send = transfers_[i].send;
    if (!send.any()) return;
    StageTensors tensors = checked(actions_[i], result, sent(actions_[i]));
    if (!crosses(send)) {
      arrivals_[static_cast<size_t>(send.peer_action)] = {std::move(tensors), {}};
      return;
    }
    Works works;
    for (const at::Tensor& tensor : tensors)
      if (tensor.numel() > 0) works.push_back(links_.to(send.peer).send(tensor, kReceiver));
    outgoing_.push_back({send.peer, send.peer_action, std::move(tensors), std::move(works)});
  }

  // -- collectives over all stages

  bool is_last() const { return links_.stage() == schedule_.num_stages - 1; }
  bool takes_joint(const Action& action) const {
    const Action::Kind kind = action.kind;
    return kind == Action::Kind::kHead || kind == Action::Kind::kLoss ||
           (is_last() && kind == Action::Kind::kBackward);
  }
  bool gives_joint(const Action& action) const {
    const Action::Kind kind = action.kind;
    return kind == Action::Kind::kHead || kind == Action::Kind::kLoss ||
           (is_last() && kind == Action::Kind::kForward);
  }

  void share_hidden(int microbatch) {
    Joint& hidden = hidden_[static_cast<size_t>(microbatch)];
    if (!is_last()) hidden.tensor = empty(hidden_format(microbatch).front());
    MEGATRON_ASSERT(hidden.tensor.defined(), "the hidden states of micro-batch ", microbatch,
                    " are not there");
    hidden.work = links_.joint().hidden.broadcast(hidden.tensor, schedule_.num_stages - 1);
  }

  at::Tensor take_joint(const Action& action) {
    const size_t m = static_cast<size_t>(action.microbatch);
    Joint& slot = action.kind == Action::Kind::kHead   ? hidden_[m]
                  : action.kind == Action::Kind::kLoss ? statistics_[m]
                                                       : hidden_grads_[m];
    const Joint arrival = std::exchange(slot, {});
    MEGATRON_ASSERT(arrival.tensor.defined() && arrival.work, "the input of ", to_string(action),
                    " on stage ", links_.stage(), " is not there");
    arrival.work->wait();
    // All stages have run H of this micro-batch, and L of earlier ones.
    if (action.kind == Action::Kind::kLoss && !is_last()) wait_for_gradients();
    return arrival.tensor;
  }

  void give_joint(const Action& action, const StageTensors& result) {
    const size_t m = static_cast<size_t>(action.microbatch);
    if (action.kind == Action::Kind::kLoss && schedule_.forward_only) return;
    if (action.kind == Action::Kind::kHead) {
      MEGATRON_ASSERT(result.front().defined(), to_string(action), " on stage ", links_.stage(),
                      " returned nothing");
      const at::Tensor tensor = result.front().detach().contiguous();
      const ProcessGroup& group = links_.joint().statistics;
      const at::Tensor all = memory_for_all(tensor, group);
      statistics_[m] = {all, group.all_gather(all, tensor)};
      return;
    }
    const at::Tensor tensor = checked(action, result, hidden_format(action.microbatch)).front();
    if (action.kind == Action::Kind::kForward)
      hidden_[m].tensor = tensor;
    else
      hidden_grads_[m] = {tensor, links_.joint().hidden_grad.all_reduce(tensor)};
  }

  // For stages that do not use them.
  void wait_for_gradients() {
    for (Joint& grad : hidden_grads_)
      if (const Joint arrival = std::exchange(grad, {}); arrival.work) arrival.work->wait();
  }

  // A message made by the peer's action `received.peer_action` has arrived: the peer has used
  // everything that its earlier actions needed.
  void release_sends(const Transfer& received) {
    std::erase_if(outgoing_, [&](Outgoing& sent) {
      if (sent.peer != received.peer || sent.used_at > received.peer_action) return false;
      wait(sent.works);
      return true;
    });
  }

  void wait_for_sends() {
    for (const Outgoing& sent : outgoing_) wait(sent.works);
    outgoing_.clear();
  }

  // -- formats

  at::Tensor empty(const TensorFormat& format) const {
    return at::empty(format.shape, at::TensorOptions().dtype(format.dtype).device(device_));
  }
  static TensorFormats gradients(TensorFormats formats) {
    std::erase_if(formats, [](const TensorFormat& format) { return !format.has_gradient(); });
    return formats;
  }
  TensorFormats received(const Action& action) const {
    return action.kind == Action::Kind::kForward
               ? stage_.format(action.chunk, Border::kInput, action.microbatch)
               : gradients(stage_.format(action.chunk, Border::kOutput, action.microbatch));
  }
  TensorFormats sent(const Action& action) const {
    return action.kind == Action::Kind::kForward
               ? stage_.format(action.chunk, Border::kOutput, action.microbatch)
               : gradients(stage_.format(action.chunk, Border::kInput, action.microbatch));
  }
  TensorFormats hidden_format(int microbatch) const {
    TensorFormats formats = stage_.format(0, Border::kHidden, microbatch);
    MEGATRON_ASSERT(formats.size() == 1, formats.size(), " tensors as hidden states");
    return formats;
  }

  // The result as it is passed on: contiguous, without autograd history.
  StageTensors checked(const Action& action, const StageTensors& result,
                       const TensorFormats& formats) const {
    MEGATRON_ASSERT(result.size() == formats.size(), to_string(action), " on stage ",
                    links_.stage(), " returned ", result.size(), " tensors to pass on, of ",
                    formats.size());
    StageTensors tensors;
    for (size_t i = 0; i < result.size(); ++i) {
      const at::Tensor& tensor = result[i];
      const at::IntArrayRef shape = formats[i].shape;
      MEGATRON_ASSERT(tensor.defined(), to_string(action), " on stage ", links_.stage(),
                      " returned nothing to pass on");
      MEGATRON_ASSERT(tensor.sizes() == shape && tensor.scalar_type() == formats[i].dtype &&
                          tensor.device().type() == device_.type(),
                      to_string(action), " on stage ", links_.stage(), " returned ",
                      tensor.scalar_type(), tensor.sizes(), " on ", tensor.device(),
                      " to pass on; between stages are ", formats[i].dtype, shape, " on ", device_);
      tensors.push_back(tensor.detach().contiguous());
    }
    return tensors;
  }

  const Schedule& schedule_;
  const std::vector<Action>& actions_;
  StageCompute& stage_;
  const PipelineLinks& links_;
  const at::Device device_;
  const std::vector<ActionTransfers>& transfers_;          // by action of this stage
  std::map<int, Incoming> incoming_;                       // by peer
  std::vector<Arrival> arrivals_;                          // by action that uses it
  std::vector<Outgoing> outgoing_;                         // not yet known to have been received
  std::vector<std::vector<int>> hidden_calls_;             // by action
  std::vector<Joint> hidden_, statistics_, hidden_grads_;  // by micro-batch
};

}  // namespace

at::Tensor StageCompute::head(int, const at::Tensor&) {
  throw InternalError("this stage holds no part of the vocabulary");
}
at::Tensor StageCompute::loss(int, const at::Tensor&) {
  throw InternalError("this stage holds no part of the vocabulary");
}

PipelineLinks::PipelineLinks(const ProcessGroup& pp, const Schedule& schedule, at::Device device,
                             bool overlap, const ProcessGroup* vocabulary)
    : stage_(pp.rank()), overlap_(overlap) {
  MEGATRON_ASSERT(pp.size() == schedule.num_stages, "a schedule of ", schedule.num_stages,
                  " stages over ", pp.size(), " ranks");
  for (const auto& [from, to] : transfer_links(schedule)) {
    if (from != stage_ && to != stage_) continue;
    const ProcessGroup link = pp.subgroup({from, to}, cat(pp.name(), "_", from, "_to_", to),
                                          CommunicatorUse::kConcurrent);
    // All ranks visit links in the same order, so no two wait for each other here.
    const at::Tensor greeting = at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device));
    if (from == stage_) {
      link.send(greeting, kReceiver)->wait();
      to_.emplace(to, link);
    } else {
      link.recv(greeting, kSender)->wait();
      from_.emplace(from, link);
    }
  }
  if (!schedule.vocab_parallel) return;
  const auto all_of = [&](const ProcessGroup& group, const char* what) {
    std::vector<int> ranks(static_cast<size_t>(group.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    const ProcessGroup own =
        group.subgroup(ranks, cat(group.name(), "_", what), CommunicatorUse::kConcurrent);
    own.all_reduce(at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(device)))->wait();
    return own;
  };
  joint_ = {all_of(pp, "hidden"), all_of(vocabulary != nullptr ? *vocabulary : pp, "statistics"),
            all_of(pp, "hidden_grad")};
}

at::Tensor PipelineLinks::exchange(const at::Tensor& hidden, const at::Tensor& statistics) const {
  const at::Tensor travelling = hidden.clone();
  joint_.hidden.broadcast(travelling, joint_.hidden.size() - 1)->wait();
  const at::Tensor all = memory_for_all(statistics, joint_.statistics);
  joint_.statistics.all_gather(all, statistics.contiguous())->wait();
  joint_.hidden_grad.all_reduce(travelling)->wait();
  return all;
}

const ProcessGroup& PipelineLinks::to(int peer) const {
  const auto found = to_.find(peer);
  MEGATRON_ASSERT(found != to_.end(), "stage ", stage_, " has no link to stage ", peer);
  return found->second;
}

const ProcessGroup& PipelineLinks::from(int peer) const {
  const auto found = from_.find(peer);
  MEGATRON_ASSERT(found != from_.end(), "stage ", stage_, " has no link from stage ", peer);
  return found->second;
}

void run_pipeline(const Schedule& schedule, const std::vector<ActionTransfers>& transfers,
                  StageCompute& stage, const PipelineLinks& links, at::Device device) {
  MEGATRON_ASSERT(links.stage() < schedule.num_stages, "stage ", links.stage(),
                  " of a schedule of ", schedule.num_stages, " stages");
  Executor(schedule, transfers, stage, links, device).run();
}

void run_pipeline(const Schedule& schedule, StageCompute& stage, const PipelineLinks& links,
                  at::Device device) {
  const auto plan = plan_transfers(schedule);
  run_pipeline(schedule, plan.at(static_cast<size_t>(links.stage())), stage, links, device);
}

}  // namespace megatron
