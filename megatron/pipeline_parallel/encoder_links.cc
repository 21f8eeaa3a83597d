#include "megatron/pipeline_parallel/encoder_links.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

// A link is a group of two; its sender has rank 0.
constexpr int kLinkSender = 0;
constexpr int kLinkReceiver = 1;

// The link from one rank of the world to another, on these two.
ProcessGroup link(const ProcessGroup& world, int sender, int receiver, const char* name,
                  at::Device device) {
  const ProcessGroup out = world.subgroup(
      {sender, receiver}, cat(name, " ", sender, " to ", receiver), CommunicatorUse::kConcurrent);
  const at::Tensor one = at::zeros({1}, at::TensorOptions().device(device));
  if (out.rank() == kLinkSender)
    out.send(one, kLinkReceiver)->wait();
  else
    out.recv(one, kLinkSender)->wait();
  return out;
}

}  // namespace

EncoderLinks::EncoderLinks(const ProcessGroup& world, const EncoderRanks& encoder,
                           const Mesh& language, at::Device device)
    : encodes_(encoder.holds(world.rank())), device_(device) {
  const int rank = world.rank(), replicas = language.group_size({Axis::kData}),
            tensor = language.group_size({Axis::kTensor}),
            encoder_tensor = static_cast<int>(encoder.tensor);
  const auto partner = [&](int place) -> Partner& {
    if (std::ssize(partners_) <= place) partners_.resize(static_cast<size_t>(place) + 1);
    return partners_[static_cast<size_t>(place)];
  };
  const auto connect = [&](int data, int replica, int i, int j) {
    const int there = i + encoder_tensor * data;
    const int here = static_cast<int>(encoder.count()) + language.rank_at({Axis::kTensor}, j) +
                     language.rank_at({Axis::kData}, replica);
    if (rank != there && rank != here) return;
    Partner& other = partner(encodes_ ? replica : data);
    if (i == j % encoder_tensor) {
      const ProcessGroup features = link(world, there, here, "features", device_);
      encodes_ ? other.to.push_back(features) : (void)(other.from = features);
    }
    if (j == i % tensor) {
      const ProcessGroup gradients = link(world, here, there, "gradients", device_);
      encodes_ ? (void)(other.from = gradients) : other.to.push_back(gradients);
    }
  };
  for (int data = 0; data < encoder.data; ++data)
    for (int replica = 0; replica < replicas; ++replica)
      for (int i = 0; i < encoder_tensor; ++i)
        for (int j = 0; j < tensor; ++j) connect(data, replica, i, j);
}

void EncoderLinks::send(const StageTensors& tensors, const TensorFormats& formats) {
  MEGATRON_ASSERT(tensors.size() == formats.size() && tensors.size() % partners_.size() == 0,
                  tensors.size(), " tensors for ", partners_.size(), " partners, of ",
                  formats.size());
  Sent& sent = sent_.emplace_back();
  for (size_t i = 0; i < tensors.size(); ++i) {
    MEGATRON_ASSERT(tensors[i].defined() && tensors[i].sizes() == formats[i].shape &&
                        tensors[i].scalar_type() == formats[i].dtype,
                    "tensor ", i, " differs from what its receiver expects");
    const at::Tensor& tensor = sent.tensors.emplace_back(tensors[i].detach().contiguous());
    if (tensor.numel() == 0) continue;
    for (const ProcessGroup& to : partners_[i % partners_.size()].to)
      sent.works.push_back(to.send(tensor, kLinkReceiver));
  }
}

StageTensors EncoderLinks::receive(const TensorFormats& formats) const {
  StageTensors tensors;
  std::vector<std::shared_ptr<Work>> works;
  for (size_t i = 0; i < formats.size(); ++i) {
    const at::Tensor& tensor = tensors.emplace_back(
        at::empty(formats[i].shape, at::TensorOptions().dtype(formats[i].dtype).device(device_)));
    if (tensor.numel() > 0)
      works.push_back(partners_[i % partners_.size()].from.recv(tensor, kLinkSender));
  }
  for (const std::shared_ptr<Work>& work : works) work->wait();
  return tensors;
}

void EncoderLinks::settle(size_t most) {
  for (; sent_.size() > most; sent_.pop_front())
    for (const std::shared_ptr<Work>& work : sent_.front().works) work->wait();
}

TensorFormats gradients_of(TensorFormats formats) {
  std::erase_if(formats, [](const TensorFormat& format) { return !format.has_gradient(); });
  return formats;
}

Schedule encoder_schedule(const Schedule& schedule) {
  constexpr int kAhead = 1;
  Schedule out;
  out.name = schedule.name;
  out.num_microbatches = schedule.num_microbatches;
  out.forward_only = schedule.forward_only;
  std::vector<Action>& actions = out.stages.emplace_back();
  int done = 0, used = 0;  // forward passes here, and of the embedding up to now
  const auto encode_up_to = [&](int count) {
    for (; done < std::min(count, schedule.num_microbatches); ++done)
      actions.push_back({Action::Kind::kForward, 0, done});
  };
  for (const Action& action : schedule.stages.front()) {
    if (action.chunk != 0) continue;
    if (action.kind == Action::Kind::kForward) {
      used = std::max(used, action.microbatch + 1);
      encode_up_to(used);
    } else if (action.kind == Action::Kind::kBackward ||
               action.kind == Action::Kind::kBackwardInput) {
      encode_up_to(used + kAhead);
      actions.push_back({Action::Kind::kBackward, 0, action.microbatch});
    }
  }
  return out;
}

std::vector<ActionTransfers> encoder_transfers(const Schedule& schedule) {
  constexpr int kLanguageModel = 1;
  std::vector<ActionTransfers> out;
  for (const Action& action : schedule.stages.front()) {
    ActionTransfers& transfers = out.emplace_back();
    const Transfer transfer = {kLanguageModel, action.microbatch, action.microbatch};
    (action.kind == Action::Kind::kForward ? transfers.send : transfers.receive) = transfer;
  }
  return out;
}

void run_encoders(const Schedule& schedule, StageCompute& compute, EncoderLinks& links) {
  int done = 0;  // forward passes
  for (const Action& action : schedule.stages.front()) {
    const int microbatch = action.microbatch;
    if (action.kind == Action::Kind::kForward) {
      links.send(compute.forward(0, microbatch, {}),
                 compute.format(0, Border::kOutput, microbatch));
      ++done;
      if (schedule.forward_only) links.settle(1);
      continue;
    }
    const StageTensors grads =
        links.receive(gradients_of(compute.format(0, Border::kOutput, microbatch)));
    // The embedding has used the features of this micro-batch
    links.settle(static_cast<size_t>(done - microbatch - 1));
    compute.backward(0, microbatch, grads, /*defer_weights=*/false);
  }
  links.settle();
}

TensorFormats BehindEncoders::format(int chunk, Border border, int microbatch) {
  return compute_.format(chunk, border, microbatch);
}

StageTensors BehindEncoders::forward(int chunk, int microbatch, const StageTensors& input) {
  if (chunk != 0) return compute_.forward(chunk, microbatch, input);
  return compute_.forward(chunk, microbatch,
                          links_.receive(compute_.format(chunk, Border::kInput, microbatch)));
}

StageTensors BehindEncoders::backward(int chunk, int microbatch, const StageTensors& grad_output,
                                      bool defer_weights) {
  StageTensors grads = compute_.backward(chunk, microbatch, grad_output, defer_weights);
  if (chunk != 0) return grads;
  links_.settle(1);
  links_.send(grads, gradients_of(compute_.format(chunk, Border::kInput, microbatch)));
  return {};
}

void BehindEncoders::weight_backward(int chunk, int microbatch) {
  compute_.weight_backward(chunk, microbatch);
}

}  // namespace megatron
