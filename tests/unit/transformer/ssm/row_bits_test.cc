// What state-space layers compute around their products: the bits of a row do not depend on the
// rows beside it, nor on where in memory it lies, with sizes that fill no vector.
#include <functional>

#include "megatron/tensor/batch_invariant/mode.h"
#include "megatron/tensor/batch_invariant/row_products.h"
#include "megatron/transformer/ssm/causal_conv.h"
#include "megatron/transformer/ssm/gated_delta.h"
#include "megatron/transformer/ssm/gated_norm.h"
#include "megatron/transformer/ssm/normed_gate.h"
#include "megatron/transformer/ssm/uniform_math.h"
#include "tests/unit/transformer/ssm/vectors.h"

namespace megatron {
namespace {

constexpr int64_t kRows = 93, kSequences = 3;

// f of x [s, b, c]: slices of rows and single sequences, views and copies, have the bits of all.
void expect_bits_of_all(const std::string& name, const at::Tensor& x,
                        const std::function<at::Tensor(const at::Tensor&)>& f) {
  const at::Tensor all = f(x);
  for (const int64_t count : {1, 2, 3, 5, 8, 17, 40})
    for (const int64_t first : {0, 1, 2, 3, 7, 30, 53}) {
      const at::Tensor rows = x.narrow(0, first, count), want = all.narrow(0, first, count);
      EXPECT_TRUE(at::equal(f(rows), want)) << name << ", " << count << " rows from " << first;
      EXPECT_TRUE(at::equal(f(rows.clone()), want)) << name << ", copied, " << count;
      EXPECT_TRUE(at::equal(f(rows.narrow(1, 1, 1)), want.narrow(1, 1, 1)))
          << name << ", " << count;
      EXPECT_TRUE(at::equal(f(rows.narrow(1, 2, 1).contiguous()), want.narrow(1, 2, 1)))
          << name << ", copied, " << count;
    }
}

TEST(RowBits, DoNotDependOnTheRowsBeside) {
  const int threads = at::get_num_threads();
  for (const at::ScalarType type : {at::kFloat, at::kDouble})
    for (const int count : {1, 3}) {
      at::set_num_threads(count);
      for (const int64_t c : {1, 7, 29, 345}) {
        // Wider rows of which these are a part.
        const at::Tensor x = (4 * u(1, {kRows, kSequences, c + 5})).to(type).narrow(2, 3, c),
                         w = u(2, {c}).to(type);
        expect_bits_of_all("exp", x, [](const at::Tensor& rows) { return at::exp(rows); });
        expect_bits_of_all("sigmoid", x, uniform_sigmoid);
        expect_bits_of_all("silu", x, uniform_silu);
        expect_bits_of_all("softplus", x, uniform_softplus);
        expect_bits_of_all("unit length", x, unit_length);
        expect_bits_of_all("time steps", x,
                           [&](const at::Tensor& rows) { return time_steps(rows, w, {}); });
        expect_bits_of_all("gated norm", x, [&](const at::Tensor& rows) {
          return gated_norm(rows + 0.5, rows, w, {.count = 1, .shared = nullptr, .eps = 1e-5}).o;
        });
        expect_bits_of_all("normed gate", x, [&](const at::Tensor& rows) {
          const at::Tensor heads = rows.unsqueeze(2);
          return normed_gate(heads + 0.5, heads, w, 1e-5).o.squeeze(2);
        });
        const at::Tensor taps = u(3, {c, 1, 4}).to(type), whole = causal_conv(x, taps, w, {});
        for (const int64_t first : {3, 4, 30, 53})
          for (const int64_t rows : {1, 2, 5, 40})
            EXPECT_TRUE(at::equal(causal_conv(x.narrow(0, first, rows), taps, w,
                                              {.before = x.narrow(0, first - 3, 3)}),
                                  whole.narrow(0, first, rows)));
      }
    }
  at::set_num_threads(threads);
}

TEST(RowBits, MatricesAreMultipliedAndSolvedInOneOrder) {
  set_batch_invariant(true);
  for (const at::ScalarType type : {at::kFloat, at::kDouble})
    for (const int64_t q : {1, 3, 16, 33}) {
      const double bound = type == at::kFloat ? 1e-5 : 1e-13;
      const at::Tensor a = u(1, {4, 3, 1, q, q}).to(type), b = u(2, {4, 3, 2, q, 11}).to(type);
      const at::Tensor product = multiply_matrices(a, b),
                       solved = solve_unit_lower(0.5 * a.expand({4, 3, 2, q, q}), b);
      EXPECT_LT(largest((product - at::matmul(a, b)).to(at::kDouble)),
                bound * static_cast<double>(q));
      EXPECT_LT(largest((at::matmul(0.5 * a.tril(-1), solved) + solved - b).to(at::kDouble)),
                bound * static_cast<double>(q));
      for (int64_t i = 0; i < 4; ++i) {
        const auto own = [&](const at::Tensor& x) { return x.narrow(0, i, 1); };
        EXPECT_TRUE(at::equal(multiply_matrices(own(a), own(b)), own(product)));
        EXPECT_TRUE(
            at::equal(solve_unit_lower(0.5 * own(a).expand({1, 3, 2, q, q}), own(b)), own(solved)));
        // Transposed operands, and rows alone.
        EXPECT_TRUE(
            at::equal(multiply_matrices(own(a).mT().contiguous().mT(), own(b)), own(product)));
        EXPECT_TRUE(at::equal(multiply_matrices(own(a).narrow(3, q - 1, 1), own(b)),
                              own(product).narrow(3, q - 1, 1)));
      }
    }
  set_batch_invariant(false);
}

// In batch-invariant mode scans and their gradients are those without it, also of packed documents.
TEST(RowBits, ScansOfTheModeAreTheSameFunctions) {
  const auto unit = [](int64_t c, at::IntArrayRef shape) { return unit_length(u(c, shape)); };
  const int64_t s = 23, b = 2;
  const at::Tensor runs = document_runs(at::stack({at::arange(s) / 9, at::arange(s) / 4}).floor());
  const ScanOperands scan{u(1, {s, b, 4, 3}),
                          u(2, {s, b, 4}).abs(),
                          -u(3, {4}).abs() - 0.1,
                          u(4, {s, b, 2, 5}),
                          u(5, {s, b, 2, 5}),
                          u(6, {4}),
                          runs};
  const DeltaOperands delta{unit(7, {s, b, 2, 5}),   unit(8, {s, b, 2, 5}),  u(9, {s, b, 4, 3}),
                            -u(10, {s, b, 4}).abs(), u(11, {s, b, 4}).abs(), runs};
  std::vector<at::Tensor> found[2];
  for (const bool on : {false, true}) {
    set_batch_invariant(on);
    const ScanResult y = ssd_scan(scan, {}, 5, LastChunk::kFilled);
    const ScanGrads dscan = ssd_scan_backward(u(12, {s, b, 4, 3}), {}, scan, {}, 5);
    const DeltaResult o = delta_rule(delta, {}, 5, LastChunk::kFilled);
    const DeltaGrads ddelta = delta_rule_backward(u(13, {s, b, 4, 3}), {}, delta, {}, 5);
    found[on] = {y.y, y.state, dscan.x,  dscan.dt, dscan.A,  dscan.B,  dscan.C,    dscan.D,
                 o.o, o.state, ddelta.q, ddelta.k, ddelta.v, ddelta.g, ddelta.beta};
  }
  set_batch_invariant(false);
  for (size_t i = 0; i < found[0].size(); ++i)
    EXPECT_LT(largest(found[1][i] - found[0][i]), 1e-12) << i;
}

}  // namespace
}  // namespace megatron
