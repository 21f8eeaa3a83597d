// Speed of encoding on one core and on several, in processor time, and the ids for comparison with
// other programs.
//
//   bench_tokenizer --input TEXT --tokenizer-type ... [--ids FILE] [--decoded FILE] [--threads N]
//                   [--repeat N]
//
// The tokenizer is given by the flags of megatron. TEXT is cut into documents of 4,000 bytes, at
// character boundaries, or read as JSON lines ("text") when its name ends in .jsonl. Prints one
// JSON object. --ids writes, for each document, the number of ids and the ids as little-endian
// int32; --decoded the number of bytes of the decoded text and the bytes. --repeat 0 measures
// nothing.
#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/parse.h"
#include "megatron/tokenizers/tokenizer.h"

namespace megatron {
namespace {

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::vector<std::string> read_documents(const std::string& path) {
  std::vector<std::string> documents;
  if (path.ends_with(".jsonl")) {
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) {
      documents.push_back(nlohmann::json::parse(line).at("text").get<std::string>());
    }
    return documents;
  }
  const std::string text = read_file(path);
  for (size_t begin = 0; begin < text.size();) {
    size_t end = std::min(begin + 4000, text.size());
    while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) ++end;
    documents.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return documents;
}

struct BenchConfig : Config {
  std::string input, ids, decoded;
  int64_t threads = 1, repeat = 1;
  void fields(FieldVisitor& v) override {
    v.group("bench_tokenizer");
    v.field("input", input, "the text");
    v.field("ids", ids, "file for the ids");
    v.field("decoded", decoded, "file for the decoded text");
    v.field("threads", threads, "threads of the second measurement");
    v.field("repeat", repeat, "how often each document is encoded");
  }
};

void write_counted(std::ofstream& out, const void* data, size_t count, size_t width) {
  const auto number = static_cast<int32_t>(count);
  out.write(reinterpret_cast<const char*>(&number), sizeof(number));
  out.write(static_cast<const char*>(data), static_cast<std::streamsize>(count * width));
}

void write_results(const Tokenizer& tokenizer, const std::vector<std::string>& documents,
                   const BenchConfig& config) {
  std::ofstream ids_out(config.ids, std::ios::binary), text_out(config.decoded, std::ios::binary);
  for (const std::string& document : documents) {
    const std::vector<int32_t> ids = tokenizer.encode(document);
    write_counted(ids_out, ids.data(), ids.size(), sizeof(int32_t));
    if (config.decoded.empty()) continue;
    const std::string text = tokenizer.decode(ids);
    write_counted(text_out, text.data(), text.size(), 1);
  }
  MEGATRON_CHECK(ids_out.good(), config.ids, ": cannot be written");
  MEGATRON_CHECK(config.decoded.empty() || text_out.good(), config.decoded, ": cannot be written");
}

// Each thread encodes every document `repeat` times; the result is the processor time of all of
// them.
double encode_all(const Tokenizer& tokenizer, const std::vector<std::string>& documents,
                  int threads, int repeat) {
  std::atomic<int64_t> nanoseconds{0};
  const auto work = [&] {
    std::vector<int32_t> ids;
    const double start = thread_seconds();
    for (int i = 0; i < repeat; ++i) {
      for (const std::string& document : documents) {
        ids.clear();
        tokenizer.encode_append(document, ids);
      }
    }
    nanoseconds += static_cast<int64_t>((thread_seconds() - start) * 1e9);
  };
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) pool.emplace_back(work);
  for (std::thread& thread : pool) thread.join();
  return static_cast<double>(nanoseconds) * 1e-9;
}

int run(int argc, char** argv) {
  BenchConfig config;
  TokenizerConfig tokenizer_config;
  const std::array<Config*, 2> configs = {&config, &tokenizer_config};
  if (parse_flags(configs, argc, argv).help) {
    std::fputs(
        help_text("bench_tokenizer --input TEXT --tokenizer-type TYPE [options]", configs).c_str(),
        stdout);
    return 0;
  }
  const auto tokenizer = make_tokenizer(tokenizer_config);
  const std::vector<std::string> documents = read_documents(config.input);
  size_t bytes = 0;
  for (const std::string& document : documents) bytes += document.size();
  if (!config.ids.empty()) write_results(*tokenizer, documents, config);
  const auto threads = static_cast<int>(config.threads), repeat = static_cast<int>(config.repeat);
  const double one = encode_all(*tokenizer, documents, 1, repeat);
  const double many = threads > 1 ? encode_all(*tokenizer, documents, threads, repeat) : one;
  const double megabytes = static_cast<double>(bytes) * repeat / 1e6;
  std::printf(
      "{\"bytes\": %zu, \"vocab_size\": %lld, \"mb_per_core_second\": %.2f, \"threads\": %d, "
      "\"mb_per_core_second_with_threads\": %.2f}\n",
      bytes, static_cast<long long>(tokenizer->vocab_size()), megabytes / one, threads,
      megabytes * threads / many);
  return 0;
}

}  // namespace
}  // namespace megatron

int main(int argc, char** argv) {
  try {
    return megatron::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
