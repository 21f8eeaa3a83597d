// Speed of encoding on one core and on several, in processor time, and the ids for comparison with
// other programs.
//
//   bench_tokenizer TOKENIZER TEXT [--ids FILE] [--threads N] [--repeat N]
//
// TOKENIZER is a tokenizer.json or the folder of one; TEXT is cut into documents of 4,000 bytes, at
// character boundaries, or read as JSON lines ("text") when its name ends in .jsonl. Prints one
// JSON object. --ids writes, for each document, the number of ids and the ids as little-endian
// int32.
#include <time.h>

#include <algorithm>
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

void write_ids(const Tokenizer& tokenizer, const std::vector<std::string>& documents,
               const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  for (const std::string& document : documents) {
    const std::vector<int32_t> ids = tokenizer.encode(document);
    const auto count = static_cast<int32_t>(ids.size());
    out.write(reinterpret_cast<const char*>(&count), sizeof(count));
    out.write(reinterpret_cast<const char*>(ids.data()),
              static_cast<std::streamsize>(ids.size() * sizeof(int32_t)));
  }
  MEGATRON_CHECK(out.good(), path, ": cannot be written");
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

int run(const std::vector<std::string>& arguments) {
  MEGATRON_CHECK(arguments.size() >= 2 && arguments.size() % 2 == 0,
                 "usage: bench_tokenizer TOKENIZER TEXT [--ids FILE] [--threads N] [--repeat N]");
  TokenizerConfig config;
  config.tokenizer_type = "HuggingFaceTokenizer";
  config.tokenizer_model = arguments[0];
  std::string ids;
  int threads = 1, repeat = 1;
  for (size_t i = 2; i < arguments.size(); i += 2) {
    if (arguments[i] == "--ids") ids = arguments[i + 1];
    if (arguments[i] == "--threads") threads = std::stoi(arguments[i + 1]);
    if (arguments[i] == "--repeat") repeat = std::stoi(arguments[i + 1]);
  }
  const auto tokenizer = make_tokenizer(config);
  const std::vector<std::string> documents = read_documents(arguments[1]);
  size_t bytes = 0;
  for (const std::string& document : documents) bytes += document.size();
  if (!ids.empty()) write_ids(*tokenizer, documents, ids);
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
    return megatron::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
