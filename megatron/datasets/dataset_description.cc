#include "megatron/datasets/dataset_description.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ranges>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::string_view kFormat = "megatron-dataset";
constexpr int64_t kVersion = 1;
constexpr size_t kMostSources = 100;  // that are named; the number of all is kept
constexpr uint64_t kMostDescriptionBytes = uint64_t{1} << 20;

// Reads the members of a description; errors name the member.
class Members {
 public:
  Members(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  std::string text(const char* key) const {
    MEGATRON_CHECK(at(key).is_string(), where_, ": ", key, " is not a string");
    return at(key).get<std::string>();
  }
  int64_t count(const char* key) const {
    MEGATRON_CHECK(at(key).is_number_integer() && at(key) >= 0, where_, ": ", key,
                   " is not a number of things");
    return at(key).get<int64_t>();
  }
  const Json& at(const char* key) const {
    const auto found = object_.find(key);
    MEGATRON_CHECK(found != object_.end(), where_, ": has no ", key);
    return *found;
  }

 private:
  const Json& object_;
  std::string where_;
};

// The JSON object of a description file; null: not one of ours.
Json ours(const fs::path& path) {
  std::error_code ignored;
  const auto size = fs::file_size(path, ignored);
  if (!ignored && size > kMostDescriptionBytes) return nullptr;  // such as the text of the data set
  Json json =
      Json::parse(read_file(path, kMostDescriptionBytes), nullptr, /*allow_exceptions=*/false);
  return json.is_object() && json.contains("format") && json["format"] == kFormat ? json
                                                                                  : Json(nullptr);
}

DatasetDescription parse(const Json& json, const std::string& path) {
  const Members root(json, path);
  const int64_t version = root.count("version");
  MEGATRON_CHECK(version == kVersion, path, ": is of version ", version, ", this program reads ",
                 kVersion, "\nhint: a later version of the program wrote it");
  DatasetDescription out;
  out.program = root.text("program");
  const Json& tokenizer = root.at("tokenizer");
  MEGATRON_CHECK(tokenizer.is_object(), path, ": tokenizer is not an object");
  const Members members(tokenizer, path + ": tokenizer");
  out.tokenizer.name = members.text("name");
  out.tokenizer.fingerprint = members.text("fingerprint");
  out.tokenizer.vocab_size = members.count("vocab_size");
  out.tokenizer.knows_text = !out.tokenizer.name.starts_with("NullTokenizer");
  const Json& eod = root.at("append_eod");
  MEGATRON_CHECK(eod.is_boolean() || eod.is_null(), path,
                 ": append_eod is not true, false or null");
  if (eod.is_boolean()) out.append_eod = eod.get<bool>();
  const Json& sources = root.at("sources");
  MEGATRON_CHECK(sources.is_array(), path, ": sources is not a list");
  for (const Json& source : sources)
    if (source.is_string()) out.sources.push_back(source.get<std::string>());
  out.element_type = root.text("element_type");
  out.num_documents = root.count("num_documents");
  out.num_sequences = root.count("num_sequences");
  out.num_tokens = root.count("num_tokens");
  return out;
}

// The hash part of a fingerprint, which begins with the type of the tokenizer.
std::string hash_of(const std::string& fingerprint) {
  return fingerprint.substr(fingerprint.rfind('-') + 1);
}

std::string text_of(const TokenizerIdentity& tokenizer) {
  return cat(tokenizer.name, " (", tokenizer.vocab_size, " ids, fingerprint ",
             hash_of(tokenizer.fingerprint).substr(0, 8), ")");
}

// Equal definitions have equal hashes, whichever type of tokenizer reads them.
bool same_ids(const TokenizerIdentity& a, const TokenizerIdentity& b) {
  constexpr size_t kDigits = 32;
  const std::string hash = hash_of(a.fingerprint);
  return a.fingerprint == b.fingerprint ||
         (hash.size() == kDigits && hash == hash_of(b.fingerprint));
}

void check_counts(const IndexedDataset& data, const DatasetDescription& description) {
  MEGATRON_CHECK(
      description.num_tokens == data.num_tokens() &&
          description.num_sequences == data.num_sequences() &&
          description.num_documents == data.num_documents() &&
          description.element_type == to_string(data.type()),
      description_path(data.prefix()).string(), ": describes ", description.num_documents,
      " documents, ", description.num_sequences, " sequences and ", description.num_tokens,
      " tokens of type ", description.element_type, ", ", idx_path(data.prefix()).string(),
      " holds ", data.num_documents(), ", ", data.num_sequences(), " and ", data.num_tokens(),
      " of ", to_string(data.type()),
      "\nhint: the data was replaced by another program; remove the description, or write "
      "the data again");
}

}  // namespace

TokenizerIdentity identity_of(const Tokenizer& tokenizer, const std::string& type) {
  TokenizerIdentity identity;
  const std::vector<fs::path> files = tokenizer.files();
  identity.name = files.empty() ? type : cat(type, " of ", files.front().string());
  identity.fingerprint = tokenizer.fingerprint();
  identity.vocab_size = tokenizer.vocab_size();
  identity.knows_text = type != "NullTokenizer";
  return identity;
}

fs::path description_path(const std::string& prefix) { return prefix + ".json"; }

std::string description_json(const DatasetDescription& description) {
  JsonWriter json(2);
  json.begin_object().member("format", kFormat).member("version", kVersion);
  json.member("program", description.program).key("tokenizer").begin_object();
  json.member("name", description.tokenizer.name)
      .member("fingerprint", description.tokenizer.fingerprint)
      .member("vocab_size", description.tokenizer.vocab_size)
      .end_object();
  json.key("append_eod");
  description.append_eod ? json.value(*description.append_eod) : json.null();
  json.member("num_sources", description.sources.size())
      .member("sources", std::views::take(description.sources, kMostSources));
  json.member("element_type", description.element_type)
      .member("num_documents", description.num_documents);
  json.member("num_sequences", description.num_sequences)
      .member("num_tokens", description.num_tokens)
      .end_object();
  return json.text() + "\n";
}

std::optional<DatasetDescription> read_description(const std::string& prefix) {
  const fs::path path = description_path(prefix);
  std::error_code ignored;
  if (!fs::exists(path, ignored) || fs::is_directory(path, ignored)) return std::nullopt;
  const Json json = ours(path);
  if (json.is_null()) return std::nullopt;
  return parse(json, path.string());
}

void refuse_existing_dataset(const std::string& prefix, bool overwrite) {
  std::error_code ignored;
  for (const fs::path& path : {bin_path(prefix), idx_path(prefix)})
    MEGATRON_CHECK(
        overwrite || !fs::exists(path, ignored), path.string(),
        ": exists already\nhint: give another --output-prefix, or --overwrite to replace "
        "the data set");
  const fs::path description = description_path(prefix);
  MEGATRON_CHECK(!fs::exists(description, ignored) || !ours(description).is_null(),
                 description.string(), ": exists already and describes no data set",
                 "\nhint: the description of the data set would replace it; give another "
                 "--output-prefix");
}

std::optional<DatasetDescription> merged_description(std::span<const std::string> inputs,
                                                     const std::string& program) {
  std::optional<DatasetDescription> merged;
  std::string first, unknown;
  for (const std::string& input : inputs) {
    const std::optional<DatasetDescription> part = read_description(input);
    if (!part) {
      unknown = input;
      continue;
    }
    check_tokenizer(IndexedDataset(input), {});
    if (!merged) {
      first = input;
      merged = part;
    }
    MEGATRON_CHECK(same_ids(merged->tokenizer, part->tokenizer), input, ": was written with ",
                   text_of(part->tokenizer), ", ", first, " with ", text_of(merged->tokenizer),
                   "\nhint: the ids of one mean other text in the other; write both with one "
                   "tokenizer");
    if (merged->append_eod != part->append_eod) merged->append_eod.reset();
  }
  if (!merged) return std::nullopt;
  if (!unknown.empty()) {
    log_warning(cat(unknown, ": does not say which tokenizer wrote it (no ",
                    description_path(unknown).filename().string(),
                    "), so the merged data set does not, either"));
    return std::nullopt;
  }
  merged->program = program;
  merged->sources.assign(inputs.begin(), inputs.end());
  return merged;
}

bool check_tokenizer(const IndexedDataset& data, const TokenizerIdentity& tokenizer) {
  const std::optional<DatasetDescription> description = read_description(data.prefix());
  if (!description) return false;
  check_counts(data, *description);
  const TokenizerIdentity& writer = description->tokenizer;
  if (tokenizer.fingerprint.empty() || same_ids(tokenizer, writer)) return true;
  if (!tokenizer.knows_text || !writer.knows_text) {
    MEGATRON_CHECK(tokenizer.vocab_size >= writer.vocab_size, data.prefix(), ": was written with ",
                   text_of(writer), ", this run's ", tokenizer.name, " has only ",
                   tokenizer.vocab_size, " ids\nhint: give --vocab-size ", writer.vocab_size);
    return true;
  }
  throw_error(cat(data.prefix(), ": was written with another tokenizer: ", text_of(writer),
                  ", this run has ", text_of(tokenizer),
                  "\nhint: give the tokenizer that wrote the data, or write the data again; when "
                  "both are known to give the same ids, remove ",
                  description_path(data.prefix()).string()));
}

}  // namespace megatron
