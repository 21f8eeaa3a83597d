// The router of a mixture of experts in passes over its logits [rows, experts]: choices, weights,
// sums of the losses that balance experts, and the gradient of all of them.
//
// With the score s of an expert and the share p of a token's scores that it has:
//
//   softmax                  p = softmax(l)
//   sigmoid, sqrtsoftplus    p_e = s_e / (sum of s + 1e-20), s = sigmoid(l) or sqrt(ln(1 + e^l))
//
// Of equal scores the lowest index comes first; NaN is the highest score. A row's results depend on
// that row alone, sums and counts are the same in every run. In fp32, choices and weights on CUDA
// are those of the CPU bit for bit.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

enum class RouterScore : uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus };

// What ranks groups of experts: the sum of the k / group_topk highest selection scores, or the
// highest one (DeepSeek-V2).
enum class GroupScore : uint8_t { kSum, kMax };

struct RoutingOptions {
  int64_t topk = 2;
  RouterScore score = RouterScore::kSoftmax;
  // Softmax over all experts; otherwise over the chosen ones.
  bool pre_softmax = false;
  double scaling_factor = 0.0;  // of the weights; 0: none
  // Experts in num_groups equal runs, of which a token may choose from group_topk; 0: no groups
  int64_t num_groups = 0, group_topk = 0;
  GroupScore group_score = GroupScore::kSum;
};

struct RouterRows {
  DType dtype = DType::kFloat32;  // of logits, bias, weights and their gradients: fp32 or fp64
  int64_t rows = 0;
  int64_t experts = 0;
  const void* logits = nullptr;   // [rows, experts]
  int64_t sequences = 1;          // row i belongs to sequence i mod sequences
  const bool* padding = nullptr;  // [rows]; true: in no sum and no count; null: none is
  RoutingOptions options;
};

// Columns of RouterForward::sums behind those of the experts.
inline constexpr int64_t kSumOfSquares = 0, kSumOfRows = 1, kMoreSums = 2;

// What is null is not computed; all is assigned but `counts`, to which is added.
struct RouterForward {
  const void* bias = nullptr;  // [experts]: added to the scores for the choice alone; null: none
  bool choices_given = false;  // `choices` is read
  int32_t* choices = nullptr;  // [rows, topk] by descending selection score
  void* weights = nullptr;     // [rows, topk], of the choices
  int32_t* counts = nullptr;   // [sequences, experts]: rows for which p_e is among the k highest
  // [sequences, experts + 2, parts] in fp64, over the rows of a sequence in each part: p_e, the
  // square of logsumexp(l), and 1. Part j has positions [n j / parts, n (j + 1) / parts) of the n =
  // rows / sequences positions of every sequence.
  double* sums = nullptr;
  int64_t parts = 1;
  bool squares = false;  // whether the squares are wanted; else 0
};
// [begin, end) of parts * sequences units; unit u has the rows of part u / sequences and sequence u
// mod sequences.
void router_forward_cpu(const RouterRows& rows, const RouterForward& args, int64_t begin,
                        int64_t end);
void router_forward_cuda(const RouterRows& rows, const RouterForward& args, void* stream);

// Losses with the weight a_q of the tokens of sequence q:
//
//   micro, sequence, global   c E/k sum_qe a_q (sum of p_e over q) phi_e
//   z                         c sum_q a_q (sum of lse^2 over q)
//
// phi_e = k n_e / max(sum of n, 1), with the counts n of all sequences, of q, and of the step.
enum BalanceTerm : uint8_t { kMicroTerm, kSequenceTerm, kGlobalTerm, kZTerm, kBalanceTerms };

struct BalanceLosses {
  int64_t experts = 0, sequences = 0, topk = 0;
  double coefficient[kBalanceTerms] = {};  // c; 0: no such loss
  const double* of_sequence = nullptr;     // [sequences]: a
};

struct BalanceForward {
  const double* sums = nullptr;  // as in RouterForward
  int64_t parts = 1;
  const int32_t* counts = nullptr;       // [sequences, experts]
  const int64_t* step_counts = nullptr;  // [experts]
  // [sequences + 2, experts]: phi of each sequence, of all, of the step; 0 without counts
  double* shares = nullptr;
  double* losses[kBalanceTerms] = {};  // [] each
  double* weights = nullptr;           // [kBalanceTerms]: c times the sum of a over the rows
};
void balance_losses_cpu(const BalanceLosses& losses, const BalanceForward& args);
void balance_losses_cuda(const BalanceLosses& losses, const BalanceForward& args, void* stream);

// dlogits of weights and losses, assigned. Null: no such gradient.
struct RouterBackward {
  const int32_t* choices = nullptr;  // [rows, topk]
  const void* dweights = nullptr;    // [rows, topk]
  BalanceLosses balance;
  const double* shares = nullptr;             // of BalanceForward
  const double* dlosses[kBalanceTerms] = {};  // [] each
  void* dlogits = nullptr;                    // [rows, experts]
};
void router_backward_cpu(const RouterRows& rows, const RouterBackward& args, int64_t begin,
                         int64_t end);
void router_backward_cuda(const RouterRows& rows, const RouterBackward& args, void* stream);

// counts[i mod sequences, choices[i, j]] += 1 for choices that are kept, of rows that are no
// padding; a negative choice counts nowhere.
struct AssignmentCounts {
  int64_t rows = 0, topk = 0, sequences = 1, experts = 0;
  const int32_t* choices = nullptr;  // [rows, topk]
  const bool* kept = nullptr;        // [rows, topk]; null: all
  const bool* padding = nullptr;     // [rows]; null: none
  int32_t* counts = nullptr;         // [sequences, experts]
};
void count_assignments_cpu(const AssignmentCounts& args);
void count_assignments_cuda(const AssignmentCounts& args, void* stream);

}  // namespace megatron
