#include <ATen/cuda/CUDAContext.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <unordered_map>

#include "megatron/base/check.h"
#include "megatron/base/log.h"
#include "megatron/kernels/fp8/fp8.h"
#include "megatron/kernels/philox.h"
#include "megatron/tensor/detail/blas_product.h"
#include "megatron/tensor/gemm.h"
#include "megatron/tensor/torch.h"

// Note [Choice of algorithms]
// With tune_gemms() on, cuBLASLt's candidates for a large product are timed at its first use, on
// random operands, and the choice is kept in a file named by GPU and library version: a second run
// reads it and so computes the same bits. A lock on the file makes the ranks of a machine share one
// choice. Timing uses its own stream and memory, because the compute stream may be waiting for
// another rank, which may wait for the lock. A GPU at its power limit slows down within tens of
// milliseconds, with some algorithms more than with others, so the finalists, among them the
// heuristic's first choice, run for that long; another one is chosen only for a clear gain. Numbers
// of rows that share a choice differ from step to step, and many are asked for: they run briefly.
//
// Note [Products in one order]
// Batch-invariant products must not choose by their number of rows how they add. cuBLASLt's kernels
// that do not divide the sum over k add its products step by step, whatever their tiles are; that
// those of different tiles do so alike is promised nowhere. So each candidate for a power of two of
// rows computes a small product of the same length of sums, and the first one is taken whose
// numbers are, in every bit, those of the library's first choice for 256 rows.
namespace megatron {
namespace {

constexpr int kCandidates = 16, kFinalists = 3, kFinalRounds = 2;
constexpr float kFinalMilliseconds = 60, kBriefMilliseconds = 8, kLeastGain = 1.01f;
// below this a product takes microseconds, as long as its launch
constexpr double kLeastOperations = 4e9;

void check_cuda(cudaError_t status, const char* call) {
  MEGATRON_CHECK(status == cudaSuccess, call,
                 " failed while an algorithm was chosen: ", cudaGetErrorString(status),
                 "\nhint: --no-gemm-tuning");
}

struct Choices {
  std::mutex mutex;
  std::string folder;  // empty: no tuning
  std::unordered_map<std::string, cublasLtMatmulAlgo_t> by_text;
  bool told_of_file = false;
  std::atomic<int64_t> asked = 0;
};

Choices& choices() {
  static Choices instance;
  return instance;
}

std::string file_path(const Choices& all, int device) {
  std::string name = at::cuda::getDeviceProperties(device)->name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return all.folder + "/gemm-" + name + "-cublaslt-" + std::to_string(cublasLtGetVersion()) +
         ".txt";
}

std::string to_hex(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  char word[17];
  for (const uint64_t data : algorithm.data) {
    std::snprintf(word, sizeof word, "%016llx", static_cast<unsigned long long>(data));
    text += word;
  }
  return text;
}

bool from_hex(const std::string& text, cublasLtMatmulAlgo_t& algorithm) {
  if (text.size() != 16 * std::size(algorithm.data)) return false;
  for (size_t i = 0; i < std::size(algorithm.data); ++i) {
    char* end = nullptr;
    const std::string word = text.substr(16 * i, 16);
    algorithm.data[i] = std::strtoull(word.c_str(), &end, 16);
    if (end != word.c_str() + 16) return false;
  }
  return true;
}

// Lines of "product = algorithm".
void read_choices(Choices& all, const std::string& path) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const size_t equals = line.find(" = ");
    cublasLtMatmulAlgo_t algorithm;
    if (equals != std::string::npos && from_hex(line.substr(equals + 3), algorithm))
      all.by_text[line.substr(0, equals)] = algorithm;
  }
}

// Locks the file of choices against other processes; without a file if the folder is not writable.
class LockedFile {
 public:
  explicit LockedFile(const std::string& path) {
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
    file_ = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file_ >= 0) flock(file_, LOCK_EX);
  }
  ~LockedFile() {
    if (file_ >= 0) close(file_);
  }
  LockedFile(const LockedFile&) = delete;
  LockedFile& operator=(const LockedFile&) = delete;

  bool append(const std::string& line) const {
    return file_ >= 0 &&
           write(file_, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  }

 private:
  int file_ = -1;
};

// Scratch memory, allocated and freed in stream order.
class ScratchMemory {
 public:
  ScratchMemory(size_t bytes, cudaStream_t stream) : stream_(stream) {
    if (cudaMallocAsync(&data_, bytes, stream) != cudaSuccess) {
      data_ = nullptr;
      cudaGetLastError();
    }
  }
  ~ScratchMemory() {
    if (data_ != nullptr) cudaFreeAsync(data_, stream_);
  }
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;
  void* get() const { return data_; }

 private:
  cudaStream_t stream_;
  void* data_ = nullptr;
};

class Stopwatch {
 public:
  Stopwatch() {
    check_cuda(cudaEventCreate(&start_), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Stopwatch() {
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  template <class F>
  float milliseconds(cudaStream_t stream, F&& work) {
    check_cuda(cudaEventRecord(start_, stream), "cudaEventRecord");
    work();
    check_cuda(cudaEventRecord(end_, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, start_, end_), "cudaEventElapsedTime");
    return ms;
  }

 private:
  cudaEvent_t start_ = nullptr, end_ = nullptr;
};

void fill_normal(void* out, int64_t count, cudaDataType_t type, uint64_t key, cudaStream_t stream) {
  RandomFill fill;
  fill.key = key;
  fill.dtype = type == CUDA_R_16BF ? DType::kBFloat16 : DType::kFloat16;
  fill.out = out;
  fill.rows = 1;
  fill.columns = fill.row_elements = count;
  fill_random_cuda(fill, stream);
}

// Fills with FP8 values of a normal distribution times 48.5, via `wide`, which holds as many bf16
// elements.
void fill_codes(void* out, int64_t count, cudaDataType_t type, uint64_t key, void* wide,
                float* scales, cudaStream_t stream) {
  fill_normal(wide, count, CUDA_R_16BF, key, stream);
  check_cuda(cudaMemsetAsync(scales, 0x42, sizeof(float), stream), "cudaMemsetAsync");  // 48.565
  Fp8Cast cast;
  cast.type = type == CUDA_R_8F_E4M3 ? Fp8Type::kE4M3 : Fp8Type::kE5M2;
  cast.rows = count / 16;  // whole rows of 16; operands of FP8 products are multiples of 256
  cast.rows -= cast.rows % 16;
  cast.columns = 16;
  cast.x = wide;
  cast.given_scale = scales;
  cast.scale = scales + 1;
  cast.in_rows = static_cast<uint8_t*>(out);
  fp8_cast_cuda(cast, stream);
}

int64_t bytes_of_scales(const BlasProduct& product) {
  return product.scaled() ? ((product.k + 127) / 128 + 4) * (std::max(product.m, product.n) + 4) * 4
                          : 16;
}

// Normal numbers; in FP8 with scales that are no powers of two. `wide`: 16 bits for each element
// of the larger operand in FP8.
void fill_operands(const BlasProduct& product, BlasOperands& operands, const ScratchMemory& a,
                   const ScratchMemory& b, const ScratchMemory& scales, const ScratchMemory& wide,
                   cudaStream_t stream) {
  if (!product.scaled()) {
    fill_normal(a.get(), product.elements_of_a(), product.type, 1, stream);
    fill_normal(b.get(), product.elements_of_b(), product.type, 2, stream);
    return;
  }
  auto* floats = static_cast<float*>(scales.get());
  fill_codes(a.get(), product.elements_of_a(), product.type, 1, wide.get(), floats, stream);
  fill_codes(b.get(), product.elements_of_b(), product.type_b, 2, wide.get(), floats, stream);
  // 0.747 each
  check_cuda(cudaMemsetAsync(floats, 0x3f, static_cast<size_t>(bytes_of_scales(product)), stream),
             "cudaMemsetAsync");
  operands.scale_a = operands.scale_b = floats;
}

// The fastest candidate, of which some run for `final_ms` each; the heuristic's first if there is
// no memory to time them.
cublasLtMatmulAlgo_t fastest(const BlasProduct& product, BlasPlan& plan,
                             const std::vector<cublasLtMatmulAlgo_t>& candidates, float final_ms) {
  const c10::cuda::CUDAStream stream = at::cuda::getStreamFromPool(
      /*isHighPriority=*/true, static_cast<c10::DeviceIndex>(product.device));
  const int64_t output_bytes =
      product.elements_of_d() * (product.output_type == CUDA_R_32F ? 4 : 2);
  const int64_t bytes = product.element_bytes();
  const int64_t wide_bytes =
      product.scaled() ? 2 * std::max(product.elements_of_a(), product.elements_of_b()) : 16;
  const ScratchMemory a(product.elements_of_a() * bytes, stream),
      b(product.elements_of_b() * bytes, stream), d(output_bytes, stream),
      bias(product.m * 4, stream), gelu_input(product.gelu_grad ? output_bytes : 16, stream),
      workspace(kBlasWorkspaceBytes, stream), scales(bytes_of_scales(product), stream),
      wide(wide_bytes, stream);
  for (const ScratchMemory* memory : {&a, &b, &d, &bias, &gelu_input, &workspace, &scales, &wide}) {
    if (memory->get() == nullptr) return candidates.front();
  }
  BlasOperands operands = {a.get(), b.get(), d.get(), product.bias ? bias.get() : nullptr, 0.0f};
  fill_operands(product, operands, a, b, scales, wide, stream);
  if (product.gelu_grad) {
    fill_normal(gelu_input.get(), product.elements_of_d(), product.type, 4, stream);
    operands.gelu_input = gelu_input.get();
  }
  fill_normal(bias.get(), product.m, product.scaled() ? CUDA_R_16BF : product.type, 3, stream);
  Stopwatch stopwatch;
  // Milliseconds of one run, the mean of `runs`.
  const auto time = [&](const cublasLtMatmulAlgo_t& algorithm, int runs) {
    bool works = true;
    const float ms = stopwatch.milliseconds(stream, [&] {
      for (int i = 0; i < runs; ++i)
        works = works &&
                plan.run(algorithm, operands, workspace.get(), stream) == CUBLAS_STATUS_SUCCESS;
    });
    return works ? ms / static_cast<float>(runs) : INFINITY;
  };
  struct Timed {
    float ms;
    size_t index;
  };
  std::vector<Timed> timed;
  for (size_t i = 0; i < candidates.size(); ++i) {
    time(candidates[i], 1);  // loads the kernel
    timed.push_back({time(candidates[i], 2), i});
  }
  const float first = timed.front().ms;
  std::stable_sort(timed.begin() + 1, timed.end(),
                   [](const Timed& x, const Timed& y) { return x.ms < y.ms; });
  timed.resize(std::min<size_t>(timed.size(), 1 + kFinalists));
  const int runs = std::clamp(static_cast<int>(final_ms / first), 2, 1000);
  for (Timed& one : timed) one.ms = INFINITY;
  for (int round = 0; round < kFinalRounds; ++round) {
    for (Timed& one : timed) one.ms = std::min(one.ms, time(candidates[one.index], runs));
  }
  const Timed& best = *std::min_element(timed.begin(), timed.end(),
                                        [](const Timed& x, const Timed& y) { return x.ms < y.ms; });
  return best.ms * kLeastGain < timed.front().ms ? candidates[best.index] : candidates.front();
}

// A small product of one kind, always on the same numbers.
class OrderProbe {
 public:
  static constexpr int64_t kMostRows = 256, kMostColumns = 512;

  // `like`: one whose k, types and epilogue count.
  explicit OrderProbe(const BlasProduct& like)
      : product_(like),
        stream_(at::cuda::getStreamFromPool(/*isHighPriority=*/true,
                                            static_cast<c10::DeviceIndex>(like.device))) {
    product_.m = product_.ldd = std::min(like.m, kMostColumns);
    product_.lda = product_.ldb = like.k;
  }

  // Of `rows` rows; empty: the algorithm cannot compute it.
  std::vector<uint16_t> run(const cublasLtMatmulAlgo_t& algorithm, int64_t rows) {
    product_.n = rows;
    const int64_t bytes = product_.element_bytes();
    const ScratchMemory a(product_.elements_of_a() * bytes, stream_),
        b(product_.elements_of_b() * bytes, stream_), d(product_.elements_of_d() * 2, stream_),
        bias(product_.m * 2, stream_),
        wide(2 * std::max(product_.elements_of_a(), product_.elements_of_b()), stream_),
        scales(bytes_of_scales(product_), stream_);
    for (const ScratchMemory* memory : {&a, &b, &d, &bias, &wide, &scales})
      MEGATRON_CHECK(memory->get() != nullptr, "no memory on the GPU to choose a product's kernel");
    BlasOperands operands = {a.get(), b.get(), d.get(), product_.bias ? bias.get() : nullptr};
    fill_operands(product_, operands, a, b, scales, wide, stream_);
    fill_normal(bias.get(), product_.m, product_.scaled() ? CUDA_R_16BF : product_.type, 3,
                stream_);
    BlasPlan plan(product_);
    if (plan.run(algorithm, operands, nullptr, stream_) != CUBLAS_STATUS_SUCCESS) return {};
    std::vector<uint16_t> numbers(static_cast<size_t>(product_.elements_of_d()));
    check_cuda(cudaMemcpyAsync(numbers.data(), d.get(), numbers.size() * 2, cudaMemcpyDeviceToHost,
                               stream_),
               "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return numbers;
  }

 private:
  BlasProduct product_;
  c10::cuda::CUDAStream stream_;
};

// Candidates, with one_order those that add alike: see Note [Products in one order]. Call with the
// lock of the choices.
std::vector<cublasLtMatmulAlgo_t> allowed_candidates(const BlasProduct& product, BlasPlan& plan) {
  std::vector<cublasLtMatmulAlgo_t> all = plan.candidates(kCandidates);
  if (!product.one_order) return all;
  static std::map<BlasProduct, std::vector<uint16_t>> numbers_of_kinds;
  OrderProbe probe(product);
  BlasProduct kind = product;
  kind.m = kind.ldd = std::min(product.m, OrderProbe::kMostColumns);
  kind.n = OrderProbe::kMostRows;
  kind.lda = kind.ldb = kind.k;
  kind.alignment = 256;
  std::vector<uint16_t>& numbers = numbers_of_kinds[kind];
  if (numbers.empty()) numbers = probe.run(BlasPlan(kind).candidates(1).front(), kind.n);
  const int64_t rows = std::min(product.n, OrderProbe::kMostRows);
  std::erase_if(all, [&](const cublasLtMatmulAlgo_t& candidate) {
    const std::vector<uint16_t> own = probe.run(candidate, rows);
    return own.empty() || !std::equal(own.begin(), own.end(), numbers.begin());
  });
  MEGATRON_CHECK(!all.empty(), "cuBLASLt ", cublasLtGetVersion(), " has no kernel for ",
                 product.text(), " that adds in the same order as for other numbers of rows",
                 "\nhint: leave --batch-invariant-mode out");
  return all;
}

// The product whose choice `product` shares: rows are columns of B, in weight gradients those that
// are summed over.
BlasProduct product_of_choice(BlasProduct product) {
  int64_t& rows = product.transpose_b ? product.k : product.n;
  rows = rows_of_choice(rows);
  return product;
}

cublasLtMatmulAlgo_t first_choice(const BlasProduct& product, const BlasPlan& plan) {
  static std::map<BlasProduct, cublasLtMatmulAlgo_t> chosen;
  const auto found = chosen.find(product);
  if (found != chosen.end()) return found->second;
  return chosen[product] = plan.candidates(1).front();
}

// The library's first choice for a power of two of rows, which all numbers up to it share.
cublasLtMatmulAlgo_t first_ordered(BlasProduct product) {
  static std::map<BlasProduct, cublasLtMatmulAlgo_t> chosen;
  int64_t rows = 1;
  while (rows < product.n) rows *= 2;
  product.n = rows;
  const auto found = chosen.find(product);
  if (found != chosen.end()) return found->second;
  BlasPlan plan(product);
  return chosen[product] = allowed_candidates(product, plan).front();
}

}  // namespace

void check_blas(cublasStatus_t status, const char* call) {
  MEGATRON_CHECK(status == CUBLAS_STATUS_SUCCESS, call, " failed: ", cublasLtGetStatusName(status),
                 ", ", cublasLtGetStatusString(status),
                 "\nhint: CUBLASLT_LOG_LEVEL=5 makes cuBLASLt print its calls");
}

int64_t gemm_choices() { return choices().asked; }

void tune_gemms(const std::string& folder) {
  Choices& all = choices();
  const std::lock_guard lock(all.mutex);
  all.folder = folder;
  all.by_text.clear();
}

std::string BlasProduct::text() const {
  const auto letter = [](bool transposed) { return transposed ? "T" : "N"; };
  const auto fp8 = [](cudaDataType_t t) { return t == CUDA_R_8F_E4M3 ? "e4m3" : "e5m2"; };
  const std::string kind =
      !scaled() ? (type == CUDA_R_16BF ? "bf16" : "fp16")
                : cat(fp8(type), " ", fp8(type_b), " scales ", static_cast<int>(scale_a), " ",
                      static_cast<int>(scale_b), fast ? " fast" : "");
  return cat(kind, output_type == CUDA_R_32F ? " fp32 " : " same ", letter(transpose_a),
             letter(transpose_b),
             bias        ? " bias "
             : gelu_grad ? " dgelu "
                         : " ",
             one_order ? "one order " : "", m, "x", n, "x", k, " ld ", lda, " ", ldb, " ", ldd,
             " align ", alignment);
}

BlasPlan::BlasPlan(const BlasProduct& product) : product_(product) {
  check_blas(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
             "cublasLtMatmulDescCreate");
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    check_blas(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof value),
               "cublasLtMatmulDescSetAttribute");
  };
  set(CUBLASLT_MATMUL_DESC_TRANSA, product.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, product.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (product.bias) set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  if (product.gelu_grad) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DGELU);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, product.ldd);
  }
  if (product.scaled()) {
    const auto mode = [](BlasScale scale) {
      switch (scale) {
        case BlasScale::kVector128:
          return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
        case BlasScale::kBlock128:
          return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
        case BlasScale::kRow:
          return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
        default:
          return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
      }
    };
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode(product.scale_a));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode(product.scale_b));
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(product.fast));
    if (product.bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, product.output_type);
    // Choosing an algorithm needs to know that there are scales; run() sets their addresses.
    const auto* some_address = reinterpret_cast<const void*>(uintptr_t{256});
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, some_address);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, some_address);
  }
  const auto layout = [](cublasLtMatrixLayout_t* to, cudaDataType_t type, bool transposed,
                         int64_t rows, int64_t columns, int64_t ld) {
    check_blas(cublasLtMatrixLayoutCreate(to, type, transposed ? columns : rows,
                                          transposed ? rows : columns, ld),
               "cublasLtMatrixLayoutCreate");
  };
  layout(&a_, product.type, product.transpose_a, product.m, product.k, product.lda);
  layout(&b_, product.scaled() ? product.type_b : product.type, product.transpose_b, product.k,
         product.n, product.ldb);
  layout(&d_, product.output_type, false, product.m, product.n, product.ldd);
}

BlasPlan::~BlasPlan() {
  if (d_ != nullptr) cublasLtMatrixLayoutDestroy(d_);
  if (b_ != nullptr) cublasLtMatrixLayoutDestroy(b_);
  if (a_ != nullptr) cublasLtMatrixLayoutDestroy(a_);
  if (operation_ != nullptr) cublasLtMatmulDescDestroy(operation_);
}

std::vector<cublasLtMatmulAlgo_t> BlasPlan::candidates(int count) const {
  cublasLtMatmulPreference_t preference = nullptr;
  check_blas(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>,
                        decltype(&cublasLtMatmulPreferenceDestroy)>
      owner(preference, cublasLtMatmulPreferenceDestroy);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_blas(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
               "cublasLtMatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, product_.one_order ? 0 : kBlasWorkspaceBytes);
  // Split-K sums are added in fp32, in a fixed order.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(product_.one_order ? CUBLASLT_REDUCTION_SCHEME_NONE
                                               : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(attribute, product_.alignment);
  }
  std::vector<cublasLtMatmulHeuristicResult_t> results(count);
  int found = 0;
  ++choices().asked;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(at::cuda::getCurrentCUDABlasLtHandle(), operation_, a_, b_, d_,
                                     d_, preference, count, results.data(), &found);
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) check_blas(status, "cublasLtMatmulAlgoGetHeuristic");
  MEGATRON_CHECK(status == CUBLAS_STATUS_SUCCESS && found > 0, "cuBLASLt ", cublasLtGetVersion(),
                 " knows no algorithm for the product ", product_.text(),
                 product_.scaled()
                     ? "\nhint: FP8 by blocks needs a Hopper GPU and cuBLASLt 12.9 or later; "
                       "--fp8-recipe tensorwise needs neither"
                     : "");
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (int i = 0; i < found; ++i) algorithms.push_back(results[i].algo);
  return algorithms;
}

cublasStatus_t BlasPlan::run(const cublasLtMatmulAlgo_t& algorithm, const BlasOperands& operands,
                             void* workspace, cudaStream_t stream) {
  if (product_.bias) {
    const cublasStatus_t status = cublasLtMatmulDescSetAttribute(
        operation_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &operands.bias, sizeof operands.bias);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  if (product_.gelu_grad) {
    const cublasStatus_t status =
        cublasLtMatmulDescSetAttribute(operation_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                                       &operands.gelu_input, sizeof operands.gelu_input);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  if (product_.scaled()) {
    for (const auto& [attribute, pointer] :
         {std::pair{CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &operands.scale_a},
          std::pair{CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &operands.scale_b}}) {
      const cublasStatus_t status =
          cublasLtMatmulDescSetAttribute(operation_, attribute, pointer, sizeof *pointer);
      if (status != CUBLAS_STATUS_SUCCESS) return status;
    }
  }
  const float alpha = 1.0f;
  const void* c = operands.c != nullptr ? operands.c : operands.d;
  return cublasLtMatmul(at::cuda::getCurrentCUDABlasLtHandle(), operation_, &alpha, operands.a, a_,
                        operands.b, b_, &operands.beta, c, d_, operands.d, d_, &algorithm,
                        workspace, workspace != nullptr ? kBlasWorkspaceBytes : 0, stream);
}

cublasLtMatmulAlgo_t choose_algorithm(const BlasProduct& asked) {
  const BlasProduct product = product_of_choice(asked);
  BlasPlan plan(product);
  Choices& all = choices();
  const std::lock_guard lock(all.mutex);
  const double operations = 2.0 * static_cast<double>(product.m) * static_cast<double>(product.n) *
                            static_cast<double>(product.k);
  if (all.folder.empty() || operations < kLeastOperations)
    return product.one_order ? first_ordered(product) : first_choice(product, plan);
  const std::string text = product.text(), path = file_path(all, product.device);
  if (const auto found = all.by_text.find(text); found != all.by_text.end()) return found->second;
  // Timed without the lock: the ranks of a machine choose at the same time. A rank waiting for
  // another's choice could block all others in a collective, and thereby that other rank, whose
  // kernels load only when its GPU is idle.
  {
    const LockedFile file(path);
    read_choices(all, path);
  }
  if (const auto found = all.by_text.find(text); found != all.by_text.end()) return found->second;
  const bool is_shared = asked.n != product.n || asked.k != product.k;
  const cublasLtMatmulAlgo_t algorithm =
      fastest(product, plan, allowed_candidates(product, plan),
              is_shared ? kBriefMilliseconds : kFinalMilliseconds);
  const LockedFile file(path);
  read_choices(all, path);  // the first written choice counts, for all ranks
  if (const auto found = all.by_text.find(text); found != all.by_text.end()) return found->second;
  all.by_text[text] = algorithm;
  if (!file.append(cat(text, " = ", to_hex(algorithm), "\n")) && !all.told_of_file) {
    all.told_of_file = true;
    log_warning(cat("the choice of GEMM algorithms cannot be kept in ", path,
                    ": another run may choose others, which changes rounding (--no-gemm-tuning "
                    "takes the library's)"));
  }
  return algorithm;
}

}  // namespace megatron
