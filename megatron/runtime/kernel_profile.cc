#include "megatron/runtime/kernel_profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <array>
#include <map>

#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr std::array kKinds = {KernelKind::kGemm, KernelKind::kAttention,
                               KernelKind::kCommunication, KernelKind::kCopy, KernelKind::kOther};

bool has_any(const std::string& name, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return name.find(word) != std::string::npos; });
}

// Length of the union of intervals, in ms. Sorts them.
double covered_ms(std::vector<std::pair<int64_t, int64_t>>& intervals) {
  std::sort(intervals.begin(), intervals.end());
  int64_t covered = 0, end = INT64_MIN;
  for (const auto& [from, to] : intervals) {
    if (to > end) covered += to - std::max(from, end);
    end = std::max(end, to);
  }
  return static_cast<double>(covered) / 1e6;
}

// Gaps without any kernel between the first and the last.
std::vector<KernelGap> find_gaps(const std::vector<KernelEvent>& events) {
  std::vector<const KernelEvent*> order;
  for (const KernelEvent& event : events) order.push_back(&event);
  std::sort(order.begin(), order.end(),
            [](const KernelEvent* a, const KernelEvent* b) { return a->start < b->start; });
  std::vector<KernelGap> gaps;
  const KernelEvent* last = order.front();  // the started kernel that ends last
  for (const KernelEvent* event : order) {
    if (event->start > last->end)
      gaps.push_back(
          {last->name, event->name, static_cast<double>(event->start - last->end) / 1e6});
    if (event->end > last->end) last = event;
  }
  std::stable_sort(gaps.begin(), gaps.end(),
                   [](const KernelGap& a, const KernelGap& b) { return a.ms > b.ms; });
  gaps.resize(std::min(gaps.size(), KernelProfile::kMaxGaps));
  return gaps;
}

// Template and parameter lists make names thousands of characters long.
std::string short_name(std::string name) {
  constexpr size_t kLimit = 72;
  if (name.size() > kLimit) {
    name.resize(kLimit - 3);
    name += "...";
  }
  return name;
}

}  // namespace

const char* to_string(KernelKind kind) {
  switch (kind) {
    case KernelKind::kGemm:
      return "GEMM";
    case KernelKind::kAttention:
      return "attention";
    case KernelKind::kCommunication:
      return "communication";
    case KernelKind::kCopy:
      return "copies and fills";
    case KernelKind::kOther:
      return "other kernels";
  }
  return "";
}

KernelKind kernel_kind(const std::string& name) {
  if (has_any(name, {"nccl", "NCCL", "Memcpy PtoP"})) return KernelKind::kCommunication;
  if (has_any(name, {"flash", "fmha", "sdpa", "attention", "cudnn::fusion"}))
    return KernelKind::kAttention;
  if (has_any(name, {"gemm", "nvjet", "cutlass", "cublas", "splitK", "splitk"}))
    return KernelKind::kGemm;
  if (has_any(name, {"Memcpy", "Memset", "memcpy", "memset"})) return KernelKind::kCopy;
  return KernelKind::kOther;
}

double KernelProfile::total_ms(KernelKind kind) const {
  double total = 0.0;
  for (const KernelTime& kernel : kernels) total += kernel.kind == kind ? kernel.ms : 0.0;
  return total;
}

KernelProfile summarize_kernels(const std::vector<KernelEvent>& events) {
  KernelProfile profile;
  if (events.empty()) return profile;
  std::map<std::string, KernelTime> by_name;
  std::vector<std::pair<int64_t, int64_t>> all, computing;
  for (const KernelEvent& event : events) {
    KernelTime& kernel = by_name[event.name];
    kernel.name = event.name;
    kernel.kind = kernel_kind(event.name);
    ++kernel.calls;
    kernel.ms += static_cast<double>(event.end - event.start) / 1e6;
    all.emplace_back(event.start, event.end);
    if (kernel.kind != KernelKind::kCommunication) computing.emplace_back(event.start, event.end);
  }
  for (auto& [name, kernel] : by_name) profile.kernels.push_back(kernel);
  std::stable_sort(profile.kernels.begin(), profile.kernels.end(),
                   [](const KernelTime& a, const KernelTime& b) { return a.ms > b.ms; });
  profile.busy_ms = covered_ms(all);
  profile.exposed_communication_ms = profile.busy_ms - covered_ms(computing);
  profile.gaps = find_gaps(events);
  int64_t last = all.front().second;
  for (const auto& [from, to] : all) last = std::max(last, to);
  profile.span_ms = static_cast<double>(last - all.front().first) / 1e6;
  return profile;
}

void write_timeline(const std::vector<KernelEvent>& events, int rank,
                    const std::filesystem::path& path) {
  int64_t zero = INT64_MAX;
  for (const KernelEvent& event : events) zero = std::min(zero, event.start);
  const auto micros = [](int64_t ns) { return static_cast<double>(ns) / 1e3; };
  JsonWriter json;
  json.begin_object().key("traceEvents").begin_array();
  for (const KernelEvent& event : events) {
    json.begin_object()
        .member("name", event.name)
        .member("cat", to_string(kernel_kind(event.name)))
        .member("ph", "X");
    json.member("pid", rank).member("tid", event.stream);
    json.member("ts", micros(event.start - zero))
        .member("dur", micros(event.end - event.start))
        .end_object();
  }
  json.end_array().member("displayTimeUnit", "ms").end_object();
  write_file_atomically(path, json.text() + "\n");
}

std::vector<KernelEvent> profile_kernels(const std::function<void()>& work) {
  using torch::profiler::impl::ActivityType;
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  const std::set<ActivityType> activities = {ActivityType::CUDA};
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
  work();
  const auto result = torch::autograd::profiler::disableProfiler();
  std::vector<KernelEvent> events;
  for (const torch::autograd::profiler::KinetoEvent& event : result->events()) {
    if (event.deviceType() != c10::DeviceType::CUDA) continue;
    const auto start = static_cast<int64_t>(event.startNs());
    events.push_back({event.name(), start, start + static_cast<int64_t>(event.durationNs()),
                      event.deviceResourceId()});
  }
  return events;
}

std::string kernel_table(const KernelProfile& profile, size_t top) {
  std::string text;
  const auto add = [&](const std::string& name, double ms, const std::string& calls) {
    text += format_text("%10.3f ms %5.1f%%  %-74s%s\n", ms, 100.0 * ms / profile.span_ms,
                        name.c_str(), calls.c_str());
  };
  for (const KernelKind kind : kKinds) add(to_string(kind), profile.total_ms(kind), "");
  add("exposed communication", profile.exposed_communication_ms, "");
  add("waiting for the host", profile.span_ms - profile.busy_ms, "");
  text += "longest kernels:\n";
  for (size_t i = 0; i < std::min(top, profile.kernels.size()); ++i) {
    const KernelTime& kernel = profile.kernels[i];
    add(short_name(kernel.name), kernel.ms, std::to_string(kernel.calls) + " calls");
  }
  text += "longest waits:\n";
  for (size_t i = 0; i < std::min(top, profile.gaps.size()); ++i) {
    const KernelGap& gap = profile.gaps[i];
    add(short_name(gap.after), gap.ms, "then " + short_name(gap.before));
  }
  return text;
}

void write_json(JsonWriter& json, const KernelProfile& profile) {
  json.begin_object();
  for (const KernelKind kind : kKinds)
    json.member(std::string(to_string(kind)) + " ms", profile.total_ms(kind));
  json.member("exposed communication ms", profile.exposed_communication_ms);
  json.member("waiting for the host ms", profile.span_ms - profile.busy_ms)
      .member("span ms", profile.span_ms);
  json.key("kernels").begin_array();
  for (const KernelTime& kernel : profile.kernels) {
    json.begin_object()
        .member("name", kernel.name)
        .member("calls", kernel.calls)
        .member("ms", kernel.ms)
        .end_object();
  }
  json.end_array().end_object();
}

}  // namespace megatron
