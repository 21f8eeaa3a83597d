#include "megatron/datasets/gpt/sample_order.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/datasets/index_cache.h"

namespace megatron {
namespace {

// One of the index arrays, in memory or mapped.
struct IndexView {
  const int32_t* i32 = nullptr;
  const uint32_t* u32 = nullptr;
  const int64_t* i64 = nullptr;
  int64_t size = 0;

  int64_t operator[](int64_t i) const { return i32 ? i32[i] : u32 ? int64_t{u32[i]} : i64[i]; }
  static IndexView of(const IndexArray& array) {
    IndexView view;
    view.size = array.size();
    if (array.is_wide) {
      view.i64 = array.wide.data();
    } else {
      view.i32 = array.narrow.data();
    }
    return view;
  }
  static IndexView of(const NpyArray& array) {
    IndexView view;
    view.size = array.size();
    if (array.dtype() == "<i4")
      view.i32 = array.as<int32_t>("<i4").data();
    else if (array.dtype() == "<u4")
      view.u32 = array.as<uint32_t>("<u4").data();
    else
      view.i64 = array.as<int64_t>("<i8").data();
    return view;
  }
};

CacheArray cache_array(const char* name, const IndexArray& array, std::vector<int64_t> shape) {
  return {name, array.is_wide ? "<i8" : "<i4", std::move(shape),
          array.is_wide ? std::as_bytes(std::span(array.wide))
                        : std::as_bytes(std::span(array.narrow))};
}

}  // namespace

struct SampleOrder::Impl {
  GPTIndexInputs inputs;
  std::string data;
  GPTIndices built;              // when the cache is not used
  std::vector<NpyArray> cached;  // document, sample, shuffle index
  IndexView documents, rows, shuffle;
  int64_t size = 0;

  void load(const SampleOrderOptions& options);
};

void SampleOrder::Impl::load(const SampleOrderOptions& options) {
  static const std::string kNames[] = {"document_index", "sample_index", "shuffle_index"};
  const auto build = [&](const std::function<void(std::span<const CacheArray>)>& store) {
    const GPTIndices indices = build_gpt_indices(inputs);
    const int64_t count = indices.sample_index.size() / 2 - 1;
    const bool wide = !indices.shuffle_wide.empty();
    const CacheArray arrays[] = {
        cache_array("document_index", indices.document_index, {indices.document_index.size()}),
        cache_array("sample_index", indices.sample_index, {count + 1, 2}),
        {"shuffle_index",
         wide ? "<i8" : "<u4",
         {count},
         wide ? std::as_bytes(std::span(indices.shuffle_wide))
              : std::as_bytes(std::span(indices.shuffle_narrow))}};
    store(arrays);
  };
  if (options.use_cache) {
    IndexCache cache(options.folder, options.name, options.description);
    if (cache.get(kNames, build, cached)) {
      documents = IndexView::of(cached[0]);
      rows = IndexView::of(cached[1]);
      shuffle = IndexView::of(cached[2]);
      return;
    }
  }
  built = build_gpt_indices(inputs);
  documents = IndexView::of(built.document_index);
  rows = IndexView::of(built.sample_index);
  if (built.shuffle_wide.empty()) {
    shuffle.u32 = built.shuffle_narrow.data();
    shuffle.size = built.shuffle_narrow.size();
  } else {
    shuffle.i64 = built.shuffle_wide.data();
    shuffle.size = built.shuffle_wide.size();
  }
}

SampleOrder::SampleOrder(const GPTIndexInputs& inputs, const SampleOrderOptions& options)
    : impl_([&] {
        auto made = std::make_unique<Impl>();
        made->inputs = inputs;
        made->data = options.data;
        made->load(options);
        made->size = made->shuffle.size;
        MEGATRON_CHECK(made->rows.size == 2 * (made->size + 1), made->data,
                       ": the cached sample index has ", made->rows.size / 2, " rows, expected ",
                       made->size + 1, "\nhint: remove the cache folder");
        return made;
      }()) {}

SampleOrder::~SampleOrder() = default;

int64_t SampleOrder::size() const { return impl_->size; }

int64_t SampleOrder::num_epochs() const {
  return impl_->documents.size / (impl_->inputs.last - impl_->inputs.first);
}

std::vector<SequencePiece> SampleOrder::pieces(int64_t index) const {
  const Impl& d = *impl_;
  MEGATRON_CHECK(index >= 0 && index < d.size, d.data, ": there is no sample ", index, " of ",
                 d.size);
  const int64_t row = d.shuffle[index];
  MEGATRON_CHECK(row >= 0 && row < d.size, d.data, ": the cached shuffle index points to row ", row,
                 " of ", d.size, "\nhint: remove the cache folder");
  const int64_t d0 = d.rows[2 * row], o0 = d.rows[2 * row + 1], d1 = d.rows[2 * row + 2],
                o1 = d.rows[2 * row + 3];
  MEGATRON_CHECK(d0 >= 0 && d0 <= d1 && d1 < d.documents.size, d.data,
                 ": the cached sample index's row ", row, " reaches from document ", d0, " to ", d1,
                 " of ", d.documents.size, "\nhint: remove the cache folder");
  const int64_t most = d.inputs.sequence_length + d.inputs.extra;
  std::vector<SequencePiece> pieces;
  int64_t total = 0;
  for (int64_t k = d0; k <= d1; ++k) {
    const int64_t sequence = d.documents[k];
    MEGATRON_CHECK(sequence >= d.inputs.first && sequence < d.inputs.last, d.data,
                   ": the cached document index names sequence ", sequence, ", the split has ",
                   d.inputs.first, " to ", d.inputs.last - 1, "\nhint: remove the cache folder");
    const int64_t begin = k == d0 ? o0 : 0;
    const int64_t end =
        k == d1 ? o1 + d.inputs.extra : d.inputs.lengths[static_cast<size_t>(sequence)];
    if (end > begin) pieces.push_back({sequence, begin, end - begin});
    total += std::max<int64_t>(0, end - begin);
  }
  MEGATRON_CHECK(total <= most, d.data, ": the cached sample index's row ", row, " covers ", total,
                 " tokens, expected at most ", most, "\nhint: remove the cache folder");
  return pieces;
}

}  // namespace megatron
