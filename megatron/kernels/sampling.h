// Drawing tokens from rows of logits, of which each rank of a group has some columns of the
// vocabulary. Between the kernels ranks exchange maxima, counts and sums of probabilities. All of
// these are exact (a probability is an integer, a share of the largest one), so that a choice
// depends neither on other rows nor on how the columns are divided; CUDA and CPU give the same bits
// in fp32.
#pragma once

#include <cstdint>

#include "megatron/base/dtype.h"

namespace megatron {

// How the token of one row is drawn.
struct SamplingRow {
  uint64_t key = 0;          // of the draws
  int64_t position = 0;      // of the token in its sequence, below 2^32
  double temperature = 1.0;  // 0: the largest logit
  double top_p = 1.0;
  double log_min_p = 0.0;  // ln of min_p; has_min_p: false: all
  double repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;
  int32_t top_k = 0;    // 0: all
  int32_t counts = -1;  // row of SamplingLogits::counts; -1: no penalties
  int32_t mask = -1;    // row of SamplingLogits::masks; -1: every id is allowed
  int32_t first_edit = 0, num_edits = 0;
  int32_t has_min_p = 0;
};

// What is kept of a row by top-k and top-p: logits above `value`, and of equal ones those of ids up
// to `last`. During the search `prefix` has the leading digits of the value's order key, and
// `remaining` how many ids, or how much probability, are still to be found among those that share
// the prefix; negative: nothing is searched in this row.
struct SamplingKept {
  double value = 0.0;
  int64_t last = 0;
  uint64_t prefix = 0;
  int64_t remaining = -1;
};

// Rows of logits on this rank. Kernels that take it do not change it unless they say so.
struct SamplingLogits {
  DType dtype = DType::kFloat32;  // or kFloat64
  int64_t rows = 0;
  int64_t columns = 0;                 // of the vocabulary on this rank, without padding
  int64_t stride = 0;                  // elements from row to row
  int64_t first_id = 0;                // of column 0
  void* logits = nullptr;              // [rows, stride]
  const SamplingRow* row = nullptr;    // [rows]; null: the logits as they are, at temperature 1
  const double* largest = nullptr;     // [rows]: largest logit on all ranks
  const SamplingKept* kept = nullptr;  // [rows]; null: everything

  // Used by process_logits alone.
  const int32_t* edit_ids = nullptr;   // ids and what is added to their logits, -infinity: they are
  const float* edit_values = nullptr;  // not allowed
  // [.., columns]: how often an id occurs in the output, times 2, plus 1 if it occurs in the prompt
  const int32_t* counts = nullptr;
  const uint32_t* masks = nullptr;  // [.., mask_words], bit id % 32 of word id / 32: allowed
  int64_t mask_words = 0;
};

// Applies edits, penalties and masks in place; ids that are not allowed become -infinity.
// `extremes` [3, rows], assigned: 1 if a logit is NaN or +infinity, else 0; the largest logit
// before; the largest afterwards.
void process_logits_cpu(const SamplingLogits& logits, double* extremes, int64_t begin, int64_t end);
void process_logits_cuda(const SamplingLogits& logits, double* extremes, void* stream);

// Note [Selection] Top-k and top-p each search a value: that of the last id in the order of falling
// logits, then rising ids, that is kept. The search fixes its order key digit by digit: a histogram
// over the next digit of all ids that share the digits so far, summed over the ranks, tells in
// which bin the k-th id lies, or the one whose probability makes the sum reach p. Ids of equal
// logits are then counted in their order.
enum class SelectBy { kCount, kProbability };
// Whether that phase of the selection has something to do in one of the rows.
bool selects_any(const SamplingRow* rows, int64_t count, SelectBy by);
constexpr int kSelectionBins = 256;
constexpr int selection_passes(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// histogram [rows, bins], assigned: ids, or probability as integers, by the digit of a pass.
void selection_histogram_cpu(const SamplingLogits& logits, SelectBy by, int pass,
                             int64_t* histogram, int64_t begin, int64_t end);
void selection_histogram_cuda(const SamplingLogits& logits, SelectBy by, int pass,
                              int64_t* histogram, void* stream);
// Fixes the next digit of every row. `histogram`: of all ranks. Pass 0 starts the search.
void narrow_selection_cpu(const SamplingLogits& logits, SelectBy by, int pass,
                          const int64_t* histogram, SamplingKept* kept, int64_t begin, int64_t end);
void narrow_selection_cuda(const SamplingLogits& logits, SelectBy by, int pass,
                           const int64_t* histogram, SamplingKept* kept, void* stream);
// ties [rows], assigned: ids with the value that was found.
void count_ties_cpu(const SamplingLogits& logits, const SamplingKept* found, int64_t* ties,
                    int64_t begin, int64_t end);
void count_ties_cuda(const SamplingLogits& logits, const SamplingKept* found, int64_t* ties,
                     void* stream);
// Sets value and last of `found`. `before` [rows]: ties on the ranks with lower ids; null: none.
void place_ties_cpu(const SamplingLogits& logits, SelectBy by, const int64_t* before,
                    SamplingKept* found, int64_t begin, int64_t end);
void place_ties_cuda(const SamplingLogits& logits, SelectBy by, const int64_t* before,
                     SamplingKept* found, void* stream);

// best [2, rows], assigned: of what is kept the largest logit + temperature * noise, and its id;
// -infinity and -1 if nothing is kept. At temperature 0 the largest logit of all that are allowed.
// Of equal ones the lowest id.
void draw_tokens_cpu(const SamplingLogits& logits, double* best, int64_t begin, int64_t end);
void draw_tokens_cuda(const SamplingLogits& logits, double* best, void* stream);

// sums [rows], assigned: probability of what is kept, as integers; 2^43 is that of the largest.
constexpr double kWholeProbability = 8796093022208.0;
void sum_probabilities_cpu(const SamplingLogits& logits, int64_t* sums, int64_t begin, int64_t end);
void sum_probabilities_cuda(const SamplingLogits& logits, int64_t* sums, void* stream);

// The n largest of what is kept, falling, of equal ones the lower id first: values [rows, n] and
// ids [rows, n], assigned; -infinity and -1 behind the last.
void largest_logits_cpu(const SamplingLogits& logits, int64_t n, double* values, int64_t* ids,
                        int64_t begin, int64_t end);
void largest_logits_cuda(const SamplingLogits& logits, int64_t n, double* values, int64_t* ids,
                         void* stream);

// Adds the tokens that were drawn to counts [.., columns], by row of `logits`. `ids` [rows]:
// negative ones and those of other ranks are left out.
void count_tokens_cpu(const SamplingLogits& logits, const int64_t* ids, int32_t* counts,
                      int64_t begin, int64_t end);
void count_tokens_cuda(const SamplingLogits& logits, const int64_t* ids, int32_t* counts,
                       void* stream);

// What hosts and next steps learn of draws.
struct ToldDraws {
  int64_t rows = 0;
  const double* extremes = nullptr;  // [3, rows], of process_logits
  const int64_t* ids = nullptr;      // [rows], -1: no id is allowed
  int64_t* kept = nullptr;           // [rows]: the ids; 0: there is none, or logits are not finite
  double* numbers = nullptr;  // [3 rows]: those ids, then of each row its id and 1 if it is finite
};
void tell_draws_cpu(const ToldDraws& args, int64_t begin, int64_t end);
void tell_draws_cuda(const ToldDraws& args, void* stream);

}  // namespace megatron
