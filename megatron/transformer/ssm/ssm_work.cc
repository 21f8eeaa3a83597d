#include "megatron/transformer/ssm/ssm_work.h"

#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/shape.h"
#include "megatron/tensor/torch.h"
#include "megatron/transformer/ssm/causal_conv.h"
#include "megatron/transformer/ssm/gated_delta.h"
#include "megatron/transformer/ssm/gated_norm.h"
#include "megatron/transformer/ssm/normed_gate.h"
#include "megatron/transformer/ssm/ssd_scan.h"

namespace megatron {
namespace {

constexpr double kBoundChunk = 128;  // rows of a chunk of which operations are counted
constexpr int64_t kSequences[] = {1, 64};

class SsmWorks {
 public:
  SsmWorks(const TransformerConfig& config, int64_t samples, at::ScalarType type,
           c10::Device device)
      : c_(config), s_(config.seq_length), b_(samples), type_(type), device_(device) {}

  std::vector<SsmWork> all() {
    if (c_.has_letter('M')) mamba();
    if (c_.has_letter('G')) delta();
    return std::move(all_);
  }

 private:
  at::Tensor rows(int64_t s, int64_t b, at::IntArrayRef of_row, bool wide = false) const {
    std::vector<int64_t> shape = {s, b};
    shape.insert(shape.end(), of_row.begin(), of_row.end());
    const at::ScalarType type = wide ? accumulate_type(at::empty({0}, at::dtype(type_))) : type_;
    return at::randn(shape, at::dtype(type).device(device_));
  }
  at::Tensor weights(at::IntArrayRef shape) const {
    return at::randn(shape, at::dtype(type_).device(device_)).mul_(0.1);
  }
  // `elements`: read and written for each token; `operations`: of it.
  void add(const std::string& name, double operations, double elements, std::function<void()> work,
           int runs = 1) {
    const double tokens = static_cast<double>(s_ * b_);
    all_.push_back({name, tokens * operations,
                    tokens * elements * static_cast<double>(c10::elementSize(type_)),
                    std::move(work), letter_, runs});
  }
  // `states`: bytes of one sequence.
  void add_step(const std::string& name, int64_t sequences, const at::Tensor& states,
                std::function<void()> work) {
    all_.push_back({cat(name, " step of ", sequences, sequences == 1 ? " sequence" : " sequences"),
                    0.0, 2.0 * static_cast<double>(states.nbytes()), std::move(work), letter_, 0});
  }
  void convolution(const std::string& name, int64_t channels, int64_t width, bool has_bias) {
    const at::Tensor u = rows(s_, b_, {channels}), dy = rows(s_, b_, {channels}),
                     weight = weights({channels, 1, width}),
                     bias = has_bias ? weights({channels}) : at::Tensor();
    const auto c = static_cast<double>(channels);
    // The backward computes it again.
    add(name + " convolution forward", 0, 2 * c, [=] { causal_conv(u, weight, bias); }, /*runs=*/2);
    add(name + " convolution backward", 0, 3 * c,
        [=] { causal_conv_backward(dy, u, weight, bias); });
  }

  ScanOperands scan_operands(int64_t s, int64_t b) const {
    const int64_t H = c_.mamba_heads(c_), G = c_.mamba_num_groups, N = c_.mamba_state_dim;
    return {rows(s, b, {H, c_.mamba_head_dim}),
            rows(s, b, {H}, /*wide=*/true).abs_().mul_(0.1),
            rows(1, 1, {H}, /*wide=*/true).view({H}).abs_().neg_(),
            rows(s, b, {G, N}),
            rows(s, b, {G, N}),
            rows(1, 1, {H}, /*wide=*/true).view({H}),
            {}};
  }
  void mamba() {
    const std::string name = "Mamba-2";
    letter_ = 'M';
    const int64_t heads = c_.mamba_heads(c_), width = c_.mamba_width(c_),
                  chunk = c_.mamba_chunk_size;
    convolution(name, width + 2 * c_.mamba_states(), kMambaConvWidth, /*has_bias=*/true);
    const ScanOperands o = scan_operands(s_, b_);
    const at::Tensor dy = rows(s_, b_, {heads, c_.mamba_head_dim});
    const auto H = static_cast<double>(heads), P = static_cast<double>(c_.mamba_head_dim),
               N = static_cast<double>(c_.mamba_state_dim),
               G = static_cast<double>(c_.mamba_num_groups), Q = kBoundChunk;
    add(name + " scan forward", 2 * (G * Q * N + H * (Q * P + 2 * N * P)),
        2 * H * P + 2 * G * N + H, [o, chunk] { ssd_scan(o, {}, chunk); });
    add(name + " scan backward", 2 * (3 * G * Q * N + H * (2 * Q * P + 5 * N * P)),
        3 * H * P + 4 * G * N + 3 * H, [dy, o, chunk] { ssd_scan_backward(dy, {}, o, {}, chunk); });
    const at::Tensor y = rows(s_, b_, {width}), z = rows(s_, b_, {width}), w = weights({width});
    const NormGroups groups{c_.mamba_num_groups, nullptr, c_.mamba_norm_epsilon};
    const at::Tensor rstd = gated_norm(y, z, w, groups).rstd;
    add(name + " gated norm forward", 0, 3 * H * P, [=] { gated_norm(y, z, w, groups); });
    add(name + " gated norm backward", 0, 5 * H * P,
        [=] { gated_norm_backward(y, y, z, w, rstd, groups); });
    for (const int64_t sequences : kSequences) {
      const ScanOperands one = scan_operands(1, sequences);
      const ScanState state{
          rows(1, sequences, {heads, c_.mamba_head_dim, c_.mamba_state_dim}, /*wide=*/true)[0]};
      add_step(name, sequences, state.state, [=] { ssd_steps(one, state); });
    }
  }

  DeltaOperands delta_operands(int64_t s, int64_t b) const {
    const int64_t keys = c_.linear_num_key_heads, values = c_.linear_num_value_heads;
    return {unit_length(rows(s, b, {keys, c_.linear_key_head_dim})),
            unit_length(rows(s, b, {keys, c_.linear_key_head_dim})),
            rows(s, b, {values, c_.linear_value_head_dim}),
            rows(s, b, {values}, /*wide=*/true).abs_().mul_(-0.1),
            rows(s, b, {values}, /*wide=*/true).sigmoid_(),
            {}};
  }
  void delta() {
    const std::string name = "gated delta net";
    letter_ = 'G';
    const int64_t heads = c_.linear_num_value_heads, size = c_.linear_value_head_dim;
    const auto qk = static_cast<double>(c_.linear_key_width()),
               v = static_cast<double>(c_.linear_value_width()), H = static_cast<double>(heads);
    convolution(name, 2 * c_.linear_key_width() + c_.linear_value_width(),
                c_.linear_conv_kernel_dim, /*has_bias=*/false);
    const DeltaOperands o = delta_operands(s_, b_);
    const at::Tensor dy = rows(s_, b_, {heads, size});
    // Of a row and a head in chunks of q rows: scores of keys and of queries, their products with
    // values, the solve, the state read twice and written.
    const int64_t chunk = c_.linear_chunk_size;
    const auto q = static_cast<double>(chunk), K = static_cast<double>(c_.linear_key_head_dim),
               V = static_cast<double>(size);
    const double forward = 2 * H * (2 * q * K + 2 * q * V + 3 * K * V);
    add(name + " rule forward", forward, 2 * qk + 2 * v + 2 * H, [=] { delta_rule(o, {}, chunk); });
    add(name + " rule backward", 2.5 * forward, 4 * qk + 3 * v + 4 * H,
        [=] { delta_rule_backward(dy, {}, o, {}, chunk); });
    const double eps = c_.layernorm_epsilon;
    const at::Tensor z = rows(s_, b_, {heads, size}), w = weights({size});
    const at::Tensor rstd = normed_gate(dy, z, w, eps).rstd;
    add(name + " norm and gate forward", 0, 3 * v, [dy, z, w, eps] { normed_gate(dy, z, w, eps); });
    add(name + " norm and gate backward", 0, 5 * v,
        [=] { normed_gate_backward(dy, dy, z, w, rstd); });
    for (const int64_t sequences : kSequences) {
      const DeltaOperands one = delta_operands(1, sequences);
      const ScanState state{
          rows(1, sequences, {heads, c_.linear_key_head_dim, size}, /*wide=*/true)[0]};
      add_step(name, sequences, state.state, [=] { delta_steps(one, state); });
    }
  }

  const TransformerConfig& c_;
  const int64_t s_, b_;
  const at::ScalarType type_;
  const c10::Device device_;
  char letter_ = ' ';  // of the layers whose work is added
  std::vector<SsmWork> all_;
};

}  // namespace

std::vector<SsmWork> ssm_work(const TransformerConfig& config, int64_t samples, at::ScalarType type,
                              c10::Device device) {
  const at::NoGradGuard no_grad;
  return SsmWorks(config, samples, type, device).all();
}

}  // namespace megatron
