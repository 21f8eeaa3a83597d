#include "megatron/transformer/attention/kv_cache.h"

#include "megatron/tensor/torch.h"

namespace megatron {

at::Tensor KVCache::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const PagedRows& rows, const AttentionOptions& options) {
  keys_.write(rows, k.squeeze(1));
  values_.write(rows, v.squeeze(1));
  return attend_parts(
      rows, q,
      [&](const at::Tensor& single) {
        return paged_attention(single, keys_.view(), values_.view(), rows, options);
      },
      [&](const RaggedPart& part, const at::Tensor& several) {
        const int64_t from = first_seen(part, options);
        return core_attention(several, keys_.gather(rows, part, from).unsqueeze(1),
                              values_.gather(rows, part, from).unsqueeze(1), options);
      });
}

}  // namespace megatron
