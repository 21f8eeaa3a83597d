#include "megatron/datasets/multimodal/multimodal_index.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <map>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/json_writer.h"
#include "megatron/base/log.h"
#include "megatron/base/threads.h"
#include "megatron/datasets/detail/once_per_node.h"
#include "megatron/datasets/index_cache.h"
#include "megatron/datasets/multimodal/energon/energon_source.h"
#include "megatron/datasets/multimodal/medium_facts.h"
#include "megatron/datasets/multimodal/multimodal_source.h"
#include "megatron/media/decode.h"
#include "megatron/media/sound.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBatch = 256;     // rows that are encoded side by side
constexpr size_t kMostNamed = 64;  // files in what a checkpoint keeps; more are counted

// Rows of the arrays.
struct EndsRow {
  int64_t ids, runs, media, texts, shard;
};
struct RunRow {
  int64_t token, rows, medium;
};
// Where: a member of the sample's file, a file below the folder of media, bytes of the index;
// nowhere, it cannot be decoded; kJoined + i: a member of the joined file i.
enum Where : int64_t { kMember, kFile, kHeld, kBad, kJoined };
// a, b: height and width, or samples and 0. text: end of the name behind the sample's key.
struct MediumRow {
  int64_t kind, where, offset, size, a, b, text;
};

// The arrays of an index while it is built.
struct Arrays {
  std::vector<int32_t> ids;
  std::vector<RunRow> runs;
  std::vector<MediumRow> media;
  std::vector<EndsRow> ends;
  std::string texts;  // of each sample its key and the names of its media
  std::string held;   // bytes of media that rows hold themselves
  std::string bad;    // "SAMPLE REASON" on a line each
  int64_t bad_orientations = 0;
  std::string first_bad_orientation;  // the name of its image
};

// Of a file its name without folders, and a hash of its content.
using NamedHash = std::pair<std::string, std::string>;

// As a sample is added.
struct Encoded {
  SourceSample source;
  std::vector<MediumFacts> media;
  std::vector<std::string> bad;  // of each medium why it cannot be decoded
  EncodedSample tokens;
};

std::span<const uint8_t> as_bytes_of(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Up to the first empty line.
std::string_view bad_lines(std::string_view text) {
  if (text.starts_with('\n')) return {};
  return text.substr(0, text.find("\n\n") + 1);
}

void pad_to_words(std::string& bytes) { bytes.resize((bytes.size() + 3) / 4 * 4, '\0'); }

std::string medium_label(const std::string& sample, const std::string& path, size_t number) {
  return cat(sample, ": ", path.empty() ? cat("medium ", number + 1) : path);
}

template <class Row>
CacheArray array_of(const char* name, const std::vector<Row>& rows) {
  constexpr auto kColumns = static_cast<int64_t>(sizeof(Row) / sizeof(int64_t));
  return {name, "<i8", {std::ssize(rows), kColumns}, std::as_bytes(std::span(rows))};
}

CacheArray words_of(const char* name, const std::string& bytes) {
  return {name,
          "<i4",
          {static_cast<int64_t>(bytes.size() / 4)},
          std::as_bytes(std::span(bytes.data(), bytes.size()))};
}

template <class Row>
std::span<const Row> rows_of(const NpyArray& array, const std::string& path) {
  const std::span<const std::byte> bytes = array.bytes();
  MEGATRON_CHECK(array.dtype() == "<i8" && bytes.size() % sizeof(Row) == 0, path,
                 ": the cached index has an array of another form",
                 "\nhint: remove the folder of --data-cache-path");
  return {reinterpret_cast<const Row*>(bytes.data()), bytes.size() / sizeof(Row)};
}

}  // namespace

struct MultimodalIndex::Impl {
  std::string path, media_root, description, details;
  MediaRules rules;
  MultimodalIndexOptions options;
  SourceFiles files;
  std::vector<NpyArray> cached;
  Arrays own;  // used if the cache cannot be written
  std::span<const int32_t> ids;
  std::span<const RunRow> runs;
  std::span<const MediumRow> media;
  std::span<const EndsRow> ends;
  std::string_view texts, held;
  std::vector<BadSample> bad;
  std::vector<RepeatedSamples> repetitions;

  // Files whose members samples of other files have.
  std::span<const std::string> joined() const {
    if (files.energon == nullptr) return {};
    return files.energon->joined();
  }
  std::map<std::string, int64_t> joined_numbers;  // while the index is built
  int64_t where_of(const FileRange& place, size_t shard) const;
  void find_repetitions();
  std::vector<NamedHash> hash_files(const fs::path& folder) const;
  std::string describe(const std::vector<NamedHash>& hashes, const MultimodalEncoder& encoder,
                       bool in_full) const;
  void build(const MultimodalEncoder& encoder);
  Encoded encode(const MultimodalEncoder& encoder, const SourceRow& row,
                 const std::string& file) const;
  // What headers say of a medium; `bad`: why it cannot be decoded, if that is no error.
  MediumFacts facts_of(MediaKind kind, std::span<const uint8_t> bytes, const std::string& name,
                       std::string& bad) const;
  void add(const Encoded& sample, size_t shard);
  void read_bad(std::string_view lines);
  void use_own();
  void use_cached();
  bool can_be(const MediumRow& row) const;
  void check() const;
  EndsRow begin_of(int64_t i) const {
    return i == 0 ? EndsRow{} : ends[static_cast<size_t>(i) - 1];
  }
  const MediumRow& medium_row(int64_t i, int64_t medium) const {
    return media[static_cast<size_t>(begin_of(i).media + medium)];
  }
  // The key of a sample (-1), or the name of one of its media.
  std::string_view text(int64_t i, int64_t medium) const;
};

Encoded MultimodalIndex::Impl::encode(const MultimodalEncoder& encoder, const SourceRow& row,
                                      const std::string& file) const {
  Encoded out{read_sample(row, media_root_of(options.media_root, file)), {}, {}, {}};
  const auto count = std::ssize(out.source.row.media);
  MEGATRON_CHECK(count <= options.most_media, out.source.name, ": has ", count,
                 " images and sounds, more than ", options.most_media);
  for (size_t m = 0; m < out.source.row.media.size(); ++m) {
    const RowMedium& medium = out.source.row.media[m];
    const FileRange& place = out.source.places[m];
    const std::string name = medium_label(out.source.name, medium.path, m);
    std::string& bad = out.bad.emplace_back();
    if (place.path.empty()) {
      out.media.push_back(facts_of(medium.kind, as_bytes_of(medium.bytes), name, bad));
      continue;
    }
    // Headers are read from a map: no more of a file than they take.
    const MappedFile mapped(place.path);
    const auto* data = reinterpret_cast<const uint8_t*>(mapped.bytes().data()) + place.offset;
    out.media.push_back(facts_of(medium.kind, {data, place.size}, name, bad));
  }
  out.tokens = encoder.encode(out.source.row, out.media, out.source.name);
  return out;
}

MediumFacts MultimodalIndex::Impl::facts_of(MediaKind kind, std::span<const uint8_t> bytes,
                                            const std::string& name, std::string& bad) const {
  if (!options.most_bad) return read_medium_facts(kind, bytes, name, options.limits);
  MediumFacts facts{kind, kBadImage, kBadSound};
  try {
    facts = read_medium_facts(kind, bytes, name, options.limits);
    if (kind == MediaKind::kSound) {
      if (std::ssize(decode_sound({bytes, name}, options.limits)) != facts.samples)
        bad = cat(name, ": is not as long as its headers say");
      return facts;
    }
    const Image pixels = decode_image({bytes, name}, {.limits = options.limits});
    if (pixels.size() != facts.size) bad = cat(name, ": is not of the size that its headers say");
  } catch (const MediaError& error) {
    bad = error.what();
    std::ranges::replace(bad, '\n', ' ');
  }
  return facts;
}

void MultimodalIndex::Impl::read_bad(std::string_view lines) {
  bad.clear();
  for (size_t end = 0; (end = lines.find('\n')) != std::string_view::npos;
       lines.remove_prefix(end + 1)) {
    const std::string_view line = lines.substr(0, end);
    const size_t blank = line.find(' ');
    int64_t sample = -1;
    std::from_chars(line.data(), line.data() + line.size(), sample);
    MEGATRON_CHECK(blank != std::string_view::npos && sample >= 0 && sample < std::ssize(ends),
                   path, ": the cached list of bad media is damaged",
                   "\nhint: remove the folder of --data-cache-path");
    bad.push_back({sample, std::string(line.substr(blank + 1))});
  }
  if (!options.most_bad || std::ssize(bad) <= *options.most_bad) return;
  throw_error(cat(path, ": ", bad.size(), " media cannot be decoded, more than --max-bad-media ",
                  *options.most_bad, "; the first: ", bad.front().reason));
}

int64_t MultimodalIndex::Impl::where_of(const FileRange& place, size_t shard) const {
  if (place.path == files.paths[shard]) return kMember;
  const auto found = joined_numbers.find(place.path);
  return found == joined_numbers.end() ? kFile : kJoined + found->second;
}

void MultimodalIndex::Impl::find_repetitions() {
  if (files.energon != nullptr)
    for (const RepeatedFiles& part : files.energon->repetitions()) {
      const auto end =
          std::ranges::lower_bound(ends, static_cast<int64_t>(part.end), {}, &EndsRow::shard);
      repetitions.push_back({end - ends.begin(), part.times});
    }
  if (repetitions.empty()) repetitions.push_back({std::ssize(ends), 1});
}

void MultimodalIndex::Impl::add(const Encoded& sample, size_t shard) {
  const EncodedSample& tokens = sample.tokens;
  own.ids.insert(own.ids.end(), tokens.ids.begin(), tokens.ids.end());
  for (const MediaRun& run : tokens.runs) own.runs.push_back({run.token, run.rows, run.medium});
  own.texts += sample.source.name.substr(files.paths[shard].size() + 2);
  const auto key_end = std::ssize(own.texts);
  for (size_t m = 0; m < sample.media.size(); ++m) {
    const MediumFacts& facts = sample.media[m];
    const RowMedium& medium = sample.source.row.media[m];
    const FileRange& place = sample.source.places[m];
    MediumRow row{
        static_cast<int64_t>(facts.kind), kHeld, 0, 0, facts.size.height, facts.size.width, 0};
    if (facts.kind == MediaKind::kSound) row.a = facts.samples;
    if (facts.bad_orientation && own.bad_orientations++ == 0)
      own.first_bad_orientation = medium_label(sample.source.name, medium.path, m);
    if (place.path.empty() && sample.bad[m].empty()) {
      row.offset = std::ssize(own.held);
      row.size = std::ssize(medium.bytes);
      own.held += medium.bytes;
    } else {
      row.where = where_of(place, shard);
      row.offset = static_cast<int64_t>(place.offset);
      row.size = static_cast<int64_t>(place.size);
    }
    if (!sample.bad[m].empty()) {
      row.where = kBad;
      row.offset = row.size = 0;
      own.bad += cat(own.ends.size(), " ", sample.bad[m], "\n");
    }
    own.texts += medium.path;
    row.text = std::ssize(own.texts);
    own.media.push_back(row);
  }
  own.ends.push_back({std::ssize(own.ids), std::ssize(own.runs), std::ssize(own.media), key_end,
                      static_cast<int64_t>(shard)});
}

void MultimodalIndex::Impl::build(const MultimodalEncoder& encoder) {
  own = {};
  for (const std::string& file : joined()) joined_numbers.emplace(file, joined_numbers.size());
  std::vector<SourceRow> rows;
  for (size_t shard = 0; shard < files.paths.size(); ++shard) {
    const std::string& file = files.paths[shard];
    const auto flush = [&] {
      std::vector<Encoded> encoded(rows.size());
      parallel_for(std::ssize(rows), 4, [&](int64_t begin, int64_t end) {
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
          encoded[i] = encode(encoder, rows[i], file);
      });
      for (const Encoded& sample : encoded) add(sample, shard);
      rows.clear();
    };
    read_source_file(files, shard, [&](SourceRow row) {
      rows.push_back(std::move(row));
      if (rows.size() == kBatch) flush();
    });
    flush();
  }
  pad_to_words(own.texts);
  pad_to_words(own.held);
  own.bad += '\n';  // an empty line ends it, before what pads it
  pad_to_words(own.bad);
  if (own.bad_orientations > 0)
    log_warning(cat(own.first_bad_orientation, ": its EXIF gives no orientation of 1 to 8; ",
                    own.bad_orientations, " images of ", path, " are such, and taken as stored"));
}

void MultimodalIndex::Impl::use_own() {
  ids = own.ids;
  runs = own.runs;
  media = own.media;
  ends = own.ends;
  texts = own.texts;
  held = own.held;
  if (options.most_bad) read_bad(bad_lines(own.bad));
}

void MultimodalIndex::Impl::use_cached() {
  const auto chars = [](const NpyArray& array) {
    return std::string_view(reinterpret_cast<const char*>(array.bytes().data()),
                            array.bytes().size());
  };
  ids = cached[0].as<int32_t>("<i4");
  runs = rows_of<RunRow>(cached[1], path);
  media = rows_of<MediumRow>(cached[2], path);
  ends = rows_of<EndsRow>(cached[3], path);
  texts = chars(cached[4]);
  held = chars(cached[5]);
  if (options.most_bad) read_bad(bad_lines(chars(cached[6])));
}

// Whether a medium is of a kind, a place and a size that an index may have.
bool MultimodalIndex::Impl::can_be(const MediumRow& row) const {
  if (row.where < kMember || row.where >= kJoined + std::ssize(joined()) || row.offset < 0 ||
      row.size < 0 || row.size > options.limits.max_file_bytes ||
      (row.where == kBad && !options.most_bad))
    return false;
  if ((row.where == kHeld || row.where == kBad) &&
      (row.offset > std::ssize(held) || row.size > std::ssize(held) - row.offset))
    return false;
  if (row.kind == static_cast<int64_t>(MediaKind::kSound))
    return rules.hears() && row.a >= 0 &&
           row.a <= std::max(options.limits.max_audio_samples, kBadSound);
  const int64_t most =
      std::max(options.limits.max_image_pixels, kBadImage.height * kBadImage.width);
  return row.kind == static_cast<int64_t>(MediaKind::kImage) && rules.sees() && row.a >= 1 &&
         row.b >= 1 && row.a <= most / row.b;
}

// That no row leads out of the arrays or says what would take memory without end, whatever lies in
// the files.
void MultimodalIndex::Impl::check() const {
  const auto fail = [&](size_t i) {
    throw_error(cat(path, ": the cached index is damaged at sample ", i,
                    "\nhint: remove the folder of --data-cache-path"));
  };
  EndsRow last{};
  int64_t text = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const EndsRow& end = ends[i];
    if (end.ids < last.ids || end.ids > std::ssize(ids) || end.runs < last.runs ||
        end.runs > std::ssize(runs) || end.media < last.media || end.media > std::ssize(media) ||
        end.shard < last.shard || end.shard >= std::ssize(files.paths))
      fail(i);
    if (end.texts < text || end.texts > std::ssize(texts)) fail(i);
    text = end.texts;
    for (int64_t m = last.media; m < end.media; ++m) {
      const MediumRow& row = media[static_cast<size_t>(m)];
      if (row.text < text || row.text > std::ssize(texts) || !can_be(row)) fail(i);
      text = row.text;
    }
    int64_t token = -1;
    for (int64_t r = last.runs; r < end.runs; ++r) {
      const RunRow& run = runs[static_cast<size_t>(r)];
      if (run.token <= token || run.token >= end.ids - last.ids || run.rows < 1 ||
          run.rows > int64_t{1} << 32 || run.medium < 0 || run.medium >= end.media - last.media)
        fail(i);
      token = run.token;
    }
    last = end;
  }
}

std::string_view MultimodalIndex::Impl::text(int64_t i, int64_t medium) const {
  const auto end_of = [&](int64_t m) {
    return m < 0 ? ends[static_cast<size_t>(i)].texts : medium_row(i, m).text;
  };
  int64_t begin = 0;
  if (medium >= 0) {
    begin = end_of(medium - 1);
  } else if (i > 0) {
    const EndsRow before = begin_of(i);
    const int64_t count = before.media - begin_of(i - 1).media;
    begin = count == 0 ? before.texts : medium_row(i - 1, count - 1).text;
  }
  return texts.substr(static_cast<size_t>(begin), static_cast<size_t>(end_of(medium) - begin));
}

std::vector<NamedHash> MultimodalIndex::Impl::hash_files(const fs::path& folder) const {
  std::vector<NamedHash> out;
  std::vector<std::string> all = files.paths;
  all.insert(all.end(), joined().begin(), joined().end());
  for (const std::string& file : all) {
    const fs::path name = file;
    const std::string key =
        cat(name.filename().string(), "-", hash_text(fs::absolute(name).string()).substr(0, 16));
    const auto hash = [&] {
      const MappedFile mapped(name);
      return hash_text(
          {reinterpret_cast<const char*>(mapped.bytes().data()), mapped.bytes().size()});
    };
    out.emplace_back(name.filename().string(),
                     once_per_node({&folder, 1}, key, {&name, 1}, hash).text);
  }
  return out;
}

std::string MultimodalIndex::Impl::describe(const std::vector<NamedHash>& hashes,
                                            const MultimodalEncoder& encoder, bool in_full) const {
  JsonWriter json;
  json.begin_object().member("class", "MultimodalIndex").member("version", int64_t{1});
  json.key("files").begin_array();
  std::string all;
  for (const auto& [name, hash] : hashes) {
    if (!in_full)
      json.begin_object().member("name", name).member("hash", hash).end_object();
    else if (hashes.size() <= kMostNamed)
      json.value(cat(name, " ", hash));
    all += cat(name, " ", hash, "\n");
  }
  if (in_full && hashes.size() > kMostNamed)
    json.value(cat(hashes.size(), " files ", hash_text(all)));
  json.end_array().key("encoding").raw(encoder.description(in_full));
  if (files.energon != nullptr) json.key("energon").raw(files.energon->description());
  json.member("most_pixels", options.limits.max_image_pixels);
  json.member("most_bytes", options.limits.max_file_bytes);
  json.member("most_media", options.most_media);
  if (options.most_bad) json.member("marks_bad", true);
  json.end_object();
  return json.text();
}

MultimodalIndex::MultimodalIndex(const std::string& path, const MultimodalEncoder& encoder,
                                 const MultimodalIndexOptions& options)
    : impl_(std::make_unique<Impl>()) {
  Impl& d = *impl_;
  d.path = path;
  d.rules = encoder.rules();
  d.options = options;
  d.files = list_source_files(path, options.part);
  const fs::path folder = options.cache_path.empty()
                              ? media_root_of("", path) / "cache" / "MultimodalIndex"
                              : fs::path(options.cache_path);
  const std::vector<NamedHash> hashes = d.hash_files(folder);
  d.description = d.describe(hashes, encoder, /*in_full=*/false);
  d.details = d.describe(hashes, encoder, /*in_full=*/true);

  static const std::string kNames[] = {"ids", "runs", "media", "ends", "texts", "held", "bad"};
  const size_t arrays_of_index = options.most_bad ? 7 : 6;
  IndexCache cache(folder, "MultimodalIndex", d.description);
  const auto build = [&](const std::function<void(std::span<const CacheArray>)>& store) {
    d.build(encoder);
    const CacheArray arrays[] = {
        {"ids", "<i4", {std::ssize(d.own.ids)}, std::as_bytes(std::span(d.own.ids))},
        array_of("runs", d.own.runs),
        array_of("media", d.own.media),
        array_of("ends", d.own.ends),
        words_of("texts", d.own.texts),
        words_of("held", d.own.held),
        words_of("bad", d.own.bad)};
    store(std::span(arrays).first(arrays_of_index));
    d.own = {};
  };
  if (cache.get(std::span(kNames).first(arrays_of_index), build, d.cached)) {
    d.use_cached();
  } else {
    d.build(encoder);
    d.use_own();
  }
  d.check();
  MEGATRON_CHECK(!d.ends.empty(), path, ": holds no rows");
  d.find_repetitions();
}

MultimodalIndex::~MultimodalIndex() = default;
int64_t MultimodalIndex::size() const { return std::ssize(impl_->ends); }
const std::string& MultimodalIndex::path() const { return impl_->path; }
const MediaRules& MultimodalIndex::rules() const { return impl_->rules; }
const std::string& MultimodalIndex::description() const { return impl_->description; }
const std::string& MultimodalIndex::details() const { return impl_->details; }

const std::vector<RepeatedSamples>& MultimodalIndex::repetitions() const {
  return impl_->repetitions;
}

const std::vector<BadSample>& MultimodalIndex::bad_samples() const { return impl_->bad; }

bool MultimodalIndex::is_bad(int64_t i, int64_t medium) const {
  return impl_->medium_row(i, medium).where == kBad;
}

EncodedSample MultimodalIndex::sample(int64_t i) const {
  const Impl& d = *impl_;
  const EndsRow begin = d.begin_of(i), end = d.ends[static_cast<size_t>(i)];
  EncodedSample out;
  out.ids.assign(d.ids.begin() + begin.ids, d.ids.begin() + end.ids);
  for (const RunRow& run :
       d.runs.subspan(static_cast<size_t>(begin.runs), static_cast<size_t>(end.runs - begin.runs)))
    out.runs.push_back({run.token, run.rows, run.medium});
  return out;
}

int64_t MultimodalIndex::shard(int64_t i) const {
  return impl_->ends[static_cast<size_t>(i)].shard;
}

std::string MultimodalIndex::name(int64_t i) const {
  return cat(impl_->files.paths[static_cast<size_t>(shard(i))], ": ", impl_->text(i, -1));
}

int64_t MultimodalIndex::media_count(int64_t i) const {
  return impl_->ends[static_cast<size_t>(i)].media - impl_->begin_of(i).media;
}

MediumFacts MultimodalIndex::facts(int64_t i, int64_t medium) const {
  const MediumRow& row = impl_->medium_row(i, medium);
  if (row.kind == static_cast<int64_t>(MediaKind::kSound)) return {MediaKind::kSound, {}, row.a};
  return {MediaKind::kImage, {row.a, row.b}, 0};
}

IndexedMedium MultimodalIndex::medium(int64_t i, int64_t medium) const {
  const Impl& d = *impl_;
  const MediumRow& row = d.medium_row(i, medium);
  const std::string path(d.text(i, medium));
  const std::string& file = d.files.paths[static_cast<size_t>(shard(i))];
  IndexedMedium out{facts(i, medium),
                    {{}, static_cast<uint64_t>(row.offset), static_cast<uint64_t>(row.size)},
                    medium_label(name(i), path, static_cast<size_t>(medium))};
  if (row.where == kMember) out.place.path = file;
  if (row.where >= kJoined) out.place.path = d.joined()[static_cast<size_t>(row.where - kJoined)];
  if (row.where == kFile)
    out.place.path = (media_root_of(d.options.media_root, file) / path).string();
  return out;
}

std::string MultimodalIndex::bytes(int64_t i, int64_t medium) const {
  const Impl& d = *impl_;
  const IndexedMedium one = this->medium(i, medium);
  std::string out;
  if (one.place.path.empty()) {
    out = d.held.substr(one.place.offset, one.place.size);
  } else if (d.medium_row(i, medium).where == kFile) {
    const std::string& file = d.files.paths[static_cast<size_t>(shard(i))];
    out = read_range(file_below(media_root_of(d.options.media_root, file),
                                std::string(d.text(i, medium)), name(i)),
                     one.name);
  } else {
    out = read_range(one.place, one.name);
  }
  const MediumFacts now =
      read_medium_facts(one.facts.kind, as_bytes_of(out), one.name, d.options.limits);
  MEGATRON_CHECK(now.size == one.facts.size && now.samples == one.facts.samples, one.name,
                 ": is another ", name_of(now.kind), " than when the data set was indexed: ",
                 now.kind == MediaKind::kImage
                     ? cat(now.size.height, "x", now.size.width, ", it was ", one.facts.size.height,
                           "x", one.facts.size.width)
                     : cat(now.samples, " samples, it had ", one.facts.samples),
                 "\nhint: save the file of rows again, so that it is indexed again");
  return out;
}

}  // namespace megatron
