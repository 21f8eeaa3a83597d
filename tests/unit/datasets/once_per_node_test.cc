// On each node one process reads index files completely; the others use its result.
#include "megatron/datasets/detail/once_per_node.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "megatron/base/files.h"
#include "megatron/datasets/index_cache.h"
#include "megatron/datasets/indexed_dataset.h"
#include "testing.h"

namespace megatron::testing_datasets {
namespace {

namespace fs = std::filesystem;

// How many of four processes that run at the same time return true.
int count_of_processes(const std::function<bool()>& body) {
  std::vector<pid_t> processes;
  for (int i = 0; i < 4; ++i) {
    const pid_t process = ::fork();
    if (process == 0) {
      try {
        ::_exit(body() ? 1 : 0);
      } catch (...) {
        ::_exit(2);
      }
    }
    processes.push_back(process);
  }
  int count = 0;
  for (const pid_t process : processes) {
    int status = 0;
    ::waitpid(process, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) < 2);
    count += WEXITSTATUS(status);
  }
  return count;
}

void write_small(const std::string& prefix, int64_t first) {
  write_dataset(prefix, {3, 5, 2}, [&](int64_t i, int64_t t) { return first + 10 * i + t; });
}

TEST(OncePerNode, OneProcessChecksAnIndexedDataset) {
  const TempFolder folder;
  const std::string prefix = folder / "d";
  write_small(prefix, 0);
  const uint64_t hash = IndexedDataset(prefix).index_hash();
  const IndexedDatasetOptions options{.check_folders = {folder / "cache"}};
  const auto checks = [&] {
    const IndexedDataset data(prefix, options);
    if (data.index_hash() != hash || data.num_tokens() != 10) ::_exit(2);
    return data.checked_here();
  };
  EXPECT_EQ(count_of_processes(checks), 1) << "at the first start";
  EXPECT_EQ(count_of_processes(checks), 0) << "at the next one";
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  write_small(prefix, 100);  // the same sizes
  EXPECT_EQ(count_of_processes(checks), 1) << "after the files were written anew";
  EXPECT_TRUE(IndexedDataset(prefix).checked_here()) << "without a folder each for itself";
}

TEST(OncePerNode, DamageIsSeenByEveryProcess) {
  const TempFolder folder;
  const std::string prefix = folder / "d";
  write_small(prefix, 0);
  const IndexedDatasetOptions options{.check_folders = {folder / "cache"}};
  EXPECT_TRUE(IndexedDataset(prefix, options).checked_here());
  std::string bytes = read_file(idx_path(prefix));
  bytes[34] ^= 1;  // the length of the first sequence
  write_file_atomically(idx_path(prefix), bytes);
  const auto refused = [&] {
    return error_of([&] {
             IndexedDataset(prefix, options);
           }).find("d.idx: position of sequence 1") != std::string::npos;
  };
  EXPECT_EQ(count_of_processes(refused), 4);
  EXPECT_EQ(count_of_processes(refused), 4);
}

TEST(OncePerNode, OneProcessHashesCachedArrays) {
  const TempFolder folder;
  const std::string names[] = {"numbers"};
  const std::vector<int64_t> numbers = {1, 2, 3};
  const auto open = [&](IndexCache& cache) {
    std::vector<NpyArray> arrays;
    const auto build = [&](const std::function<void(std::span<const CacheArray>)>& store) {
      const CacheArray array{"numbers", "<i8", {3}, std::as_bytes(std::span(numbers))};
      store({&array, 1});
    };
    return cache.get(names, build, arrays) && arrays[0].as<int64_t>("<i8")[2] == 3;
  };
  const auto hashes = [&] {
    IndexCache cache(folder.path(), "test", "description");
    cache.summarize_with(
        [](std::span<const NpyArray> arrays) { return std::to_string(arrays[0].size()); });
    if (!open(cache) || cache.summary() != "3") ::_exit(2);
    return cache.checked_here();
  };
  EXPECT_EQ(count_of_processes(hashes), 1) << "the one that built them";
  EXPECT_EQ(count_of_processes(hashes), 0);
}

TEST(OncePerNode, ResultsAreKeptWhereTheyCanBe) {
  const TempFolder folder;
  const fs::path file = folder / "file";
  write_file_atomically(file, "content");
  int computed = 0;
  const auto get = [&](const std::vector<fs::path>& folders) {
    return once_per_node(folders, "name", {&file, 1}, [&] { return std::to_string(++computed); })
        .text;
  };
  const fs::path unwritable = folder / "file/below", kept = folder / "kept";
  EXPECT_EQ(get({unwritable, kept}), "1");
  EXPECT_EQ(get({unwritable, kept}), "1");
  EXPECT_EQ(get({unwritable}), "2") << "nowhere to keep it";
  EXPECT_EQ(get({kept}), "1");
  std::string text = read_file(kept / "name-checked.txt");
  text[text.find("\n1\n") + 1] = '7';
  write_file_atomically(kept / "name-checked.txt", text);
  EXPECT_EQ(get({kept}), "3") << "its own checksum does not agree";
  EXPECT_EQ(get({kept}), "3");
  EXPECT_THROW(once_per_node({&kept, 1}, "other", {&file, 1},
                             []() -> std::string { throw_error("damaged"); }),
               Error);
  EXPECT_FALSE(fs::exists(kept / "other-checked.txt"));
}

}  // namespace
}  // namespace megatron::testing_datasets
