// Forward and backward of a recurrent sublayer, on one rank and on many.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "megatron/nn/parameter_store.h"
#include "megatron/nn/placement.h"
#include "megatron/transformer/context_parallel/context_parallel.h"
#include "tests/unit/transformer/block_pass.h"
#include "tests/unit/transformer/ssm/vectors.h"

namespace megatron {

struct MixerPass {
  at::Tensor y, dx;
  std::map<std::string, at::Tensor> grads;
};

struct MixerRun {
  TransformerConfig config;
  at::Tensor x, dy;         // [s, b, h] of the whole sequences
  at::Tensor document_ids;  // [b, s]; undefined: one document
  at::ScalarType dtype = at::kDouble;
};

// Forward and backward of one sublayer. `values` may change the parameters first.
template <class Mixer>
MixerPass run_mixer(const MixerRun& what, const ParallelGroups& groups, bool sequence_parallel,
                    const std::function<void(const std::string&, Parameter&)>& values = {}) {
  Mixer mixer(what.config, 1, sequence_parallel, groups);
  PlainParameterStore store(mixer, what.dtype, at::kCPU, true);
  mixer.visit([](const std::string&, Parameter& parameter) {
    if (parameter.init.kind == Init::Kind::kOne) parameter.init = Init::uniform(1.5);
  });
  initialize_parameters(mixer, 3, groups);
  if (values) mixer.visit(values);
  const auto own = [&](const at::Tensor& t) {
    const at::Tensor part = zigzag_slice(t, 0, groups.cp).to(what.dtype);
    if (!sequence_parallel) return part.clone();
    const int64_t rows = part.size(0) / groups.tp.size();
    return part.narrow(0, groups.tp.rank() * rows, rows).clone();
  };
  const at::Tensor x = own(what.x).set_requires_grad(true);
  ForwardContext pass = context_of(what.x.size(0), what.x.size(1));
  pass.training = true;
  pass.document_ids = what.document_ids;
  if (what.document_ids.defined()) pass.document_runs = document_runs(what.document_ids);
  const SublayerOutput result = mixer.forward(x, LayerContext{pass, {}}, /*add=*/false);
  result.output.backward(own(what.dy));
  MixerPass out{result.output.detach(), x.grad(), {}};
  mixer.visit([&](const std::string& name, Parameter& parameter) {
    out.grads[name] = store.grad(parameter).clone();
    groups.cp.all_reduce(out.grads[name])->wait();
    if (parameter.placement.partial_grad.contains(Axis::kTensor))
      groups.tp.all_reduce(out.grads[name])->wait();
  });
  return out;
}

// A part of the serial pass is what a rank computes.
template <class Mixer>
void expect_part(const MixerRun& what, const MixerPass& serial, const ParallelGroups& groups,
                 bool sequence_parallel, const std::string& label) {
  const MixerPass pass = run_mixer<Mixer>(what, groups, sequence_parallel);
  const auto own = [&](const at::Tensor& t) {
    const at::Tensor part = zigzag_slice(t, 0, groups.cp);
    if (!sequence_parallel) return part;
    const int64_t rows = part.size(0) / groups.tp.size();
    return part.narrow(0, groups.tp.rank() * rows, rows);
  };
  EXPECT_LT(largest(pass.y - own(serial.y)), 1e-12) << label;
  EXPECT_LT(largest(pass.dx - own(serial.dx)), 1e-12) << label;
  Mixer mixer(what.config, 1, sequence_parallel, groups);
  mixer.visit([&](const std::string& name, Parameter& parameter) {
    for (const ShardPiece& piece : shard_pieces(parameter, groups)) {
      at::Tensor a = pass.grads.at(name), b = serial.grads.at(name);
      for (size_t d = 0; d < piece.local_offset.size(); ++d) {
        const auto dim = static_cast<int64_t>(d);
        a = a.narrow(dim, piece.local_offset[d], piece.global.shape[d]);
        b = b.narrow(dim, piece.global.offset[d], piece.global.shape[d]);
      }
      EXPECT_LT(largest(a - b), 1e-12) << label << ": " << name;
    }
  });
}

// Ids with a one-token document; the other sequence has other borders.
inline at::Tensor two_rows_of_ids(int64_t s, int64_t border) {
  at::Tensor of_tokens = at::zeros({2, s}, at::kLong);
  of_tokens[0].narrow(0, border, s - border) += 1;
  if (border + 1 < s) of_tokens[0].narrow(0, border + 1, s - border - 1) += 1;
  of_tokens[1].narrow(0, s / 3, s - s / 3) += 1;
  return of_tokens;
}

}  // namespace megatron
