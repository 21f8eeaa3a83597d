// Gated RMSNorm over groups: published vectors, finite differences, a group over several ranks.
#include "megatron/transformer/ssm/gated_norm.h"

#include <memory>

#include "megatron/comm/thread_backend.h"
#include "tests/unit/transformer/ssm/vectors.h"

namespace megatron {
namespace {

at::Tensor token_rows(const at::Tensor& x) { return x.unsqueeze(1); }

TEST(GatedNorm, Vectors) {
  const at::Tensor y = token_rows(u(14, {2, 4})), z = token_rows(u(15, {2, 4})),
                   w = 1 + 0.1 * u(16, {4});
  const NormGroups two{.count = 2}, one{.count = 1};
  const GatedNormResult result = gated_norm(y, z, w, two);
  expect_vector(result.o,
                {-1.52801427357, 0.220819891814, 1.22623089669, 0.605310426698, -1.28005310631,
                 -0.828373296291, 0.644333441936, 1.15280190303},
                "two groups");
  expect_vector(gated_norm(y, z, w, one).o,
                {-0.958931110413, 0.138579244789, 1.55405590004, 0.767136305654, -0.895043441622,
                 -0.579218223373, 0.792054925499, 1.41709612755},
                "one group");
  const GatedNormGrads grads =
      gated_norm_backward(token_rows(u(19, {2, 4})), y, z, w, result.rstd, two);
  expect_vector(grads.y,
                {0.0703147471729, 0.848271063207, -0.372857128672, 0.256266372366, -0.285556391619,
                 0.828373578513, 0.13477529301, -0.0592180857506},
                "dy");
  expect_vector(grads.z,
                {-0.0852485517056, 0.0555396017785, -0.360788833372, 0.770558091877, 0.648514540255,
                 -0.114601730464, 0.015025205846, -0.0441960797786},
                "dz");
  expect_vector(grads.w, {-0.232665086673, -0.00305922810819, 0.645637048236, -0.56001741135},
                "dw");
}

TEST(GatedNorm, GradientsAreFiniteDifferences) {
  for (const int64_t count : {1, 2, 3}) {
    const NormGroups groups{.count = count};
    const at::Tensor y = u(1, {3, 2, 12}), z = u(2, {3, 2, 12}), w = u(3, {12}),
                     grad = u(4, {3, 2, 12});
    const auto f = [&] { return gated_norm(y, z, w, groups).o; };
    const GatedNormGrads grads =
        gated_norm_backward(grad, y, z, w, gated_norm(y, z, w, groups).rstd, groups);
    EXPECT_LT(slope_error(y, grads.y, grad, f), 1e-7);
    EXPECT_LT(slope_error(z, grads.z, grad, f), 1e-7);
    EXPECT_LT(slope_error(w, grads.w, grad, f), 1e-7);
  }
}

// Each of four ranks holds three channels; two ranks hold one of two groups.
TEST(GatedNorm, OneGroupOverSeveralRanks) {
  const at::Tensor y = u(1, {5, 2, 12}), z = u(2, {5, 2, 12}), w = u(3, {12}),
                   grad = u(4, {5, 2, 12});
  const NormGroups two{.count = 2};
  const GatedNormResult whole = gated_norm(y, z, w, two);
  const GatedNormGrads whole_grads = gated_norm_backward(grad, y, z, w, whole.rstd, two);
  run_ranks(4, [&](const std::shared_ptr<Backend>& backend) {
    const ProcessGroup world(backend, "tp");
    const int rank = world.rank(), first = rank / 2 * 2;
    const ProcessGroup pair = world.subgroup({first, first + 1}, "pair");
    const NormGroups part{.count = 1, .shared = &pair};
    const auto own = [&](const at::Tensor& t) { return t.narrow(-1, 3 * rank, 3); };
    const GatedNormResult result = gated_norm(own(y), own(z), own(w), part);
    EXPECT_LT(largest(result.o - own(whole.o)), 1e-14);
    const GatedNormGrads grads =
        gated_norm_backward(own(grad), own(y), own(z), own(w), result.rstd, part);
    EXPECT_LT(largest(grads.y - own(whole_grads.y)), 1e-14);
    EXPECT_LT(largest(grads.z - own(whole_grads.z)), 1e-14);
    EXPECT_LT(largest(grads.w - own(whole_grads.w)), 1e-14);
  });
}

}  // namespace
}  // namespace megatron
