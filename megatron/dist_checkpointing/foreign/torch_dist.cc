#include "megatron/dist_checkpointing/foreign/torch_dist.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/dist_checkpointing/checkpoint_folder.h"
#include "megatron/dist_checkpointing/detail/io.h"
#include "megatron/dist_checkpointing/foreign/torch_archive.h"

namespace megatron {
namespace {

namespace fs = std::filesystem;
using Kind = PickleValue::Kind;

constexpr const char* kCommonFile = "common.pt";
constexpr std::string_view kCommonObject = "common_state/shard_0_1";
constexpr const char* kDataFile = "__0_0.distcp";

// All names that occur in the metadata of torch 2.x and of Megatron.
constexpr std::string_view kMetadataNames[] = {
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "torch.strided",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
};

bool is_metadata_name(std::string_view name) {
  if (std::find(std::begin(kMetadataNames), std::end(kMetadataNames), name) !=
      std::end(kMetadataNames))
    return true;
  // Element types: torch.float32, ...
  const std::string_view dtype = name.starts_with("torch.") ? name.substr(6) : std::string_view();
  return dtype.starts_with("float") || dtype.starts_with("bfloat") || dtype.starts_with("int") ||
         dtype.starts_with("uint") || dtype.starts_with("complex") || dtype == "bool" ||
         dtype == "half" || dtype == "double" || dtype == "long";
}

constexpr std::pair<DType, const char*> kTorchTypes[] = {
    {DType::kFloat64, "float64"}, {DType::kFloat32, "float32"}, {DType::kBFloat16, "bfloat16"},
    {DType::kFloat16, "float16"}, {DType::kInt64, "int64"},     {DType::kInt32, "int32"},
    {DType::kInt16, "int16"},     {DType::kInt8, "int8"},       {DType::kUInt8, "uint8"},
    {DType::kBool, "bool"}};

std::optional<DType> dtype_of_name(std::string_view name) {
  for (const auto& [dtype, text] : kTorchTypes)
    if (name == cat("torch.", text)) return dtype;
  return std::nullopt;
}

bool is_torch_dist(const fs::path& directory) {
  std::error_code ignored;
  if (!fs::is_regular_file(directory / kTorchDistConfig, ignored)) return false;
  const auto json = nlohmann::json::parse(read_file(directory / kTorchDistConfig), nullptr,
                                          /*allow_exceptions=*/false);
  return json.is_object() && json.contains("sharded_backend") &&
         json["sharded_backend"] == "torch_dist";
}

// One item of a data file.
struct Item {
  std::string file;
  uint64_t offset = 0, length = 0;
};

class Opener {
 public:
  Opener(const fs::path& directory, const std::function<bool(std::string_view)>& wanted)
      : directory_(directory),
        name_((directory / kTorchDistMetadata).string()),
        wanted_(wanted),
        metadata_(read_metadata()) {}

  TorchDistFiles run() {
    read_items();
    const PickleValue& tensors = member(metadata_.root(), "state_dict_metadata", Kind::kDict);
    std::set<std::string> seen;
    for (const auto& [key, value] : tensors.entries) {
      check(key->is(Kind::kText) && value->is(Kind::kObject), "a tensor has no name");
      check(seen.insert(key->text).second, cat(key->text, " is described twice"));
      const bool is_tensor = value->text.ends_with(".TensorStorageMetadata");
      if (is_tensor && wanted_(key->text))
        add_tensor(key->text, *value);
      else if (key->text != kCommonObject)
        others_.push_back(key->text);
    }
    add_files();
    check_manifest(manifest_, name_);
    TorchDistFiles out{std::move(manifest_), std::move(others_), read_common(), 0};
    MEGATRON_CHECK(out.common.root().is(Kind::kDict), directory_.string(),
                   ": the common state is no dict");
    const PickleValue* iteration = out.common.root().find("iteration");
    if (iteration != nullptr && iteration->is(Kind::kInt) && iteration->integer >= 0)
      out.iteration = out.manifest.iteration = iteration->integer;
    return out;
  }

 private:
  void check(bool condition, const std::string& problem) const {
    MEGATRON_CHECK(condition, name_, ": ", problem,
                   "\nhint: the file is damaged, or of a version of torch.distributed.checkpoint "
                   "that is not known");
  }
  const PickleValue& member(const PickleValue& object, std::string_view attribute,
                            Kind kind) const {
    const PickleValue* value = object.attribute(attribute);
    check(value != nullptr && value->kind == kind,
          cat(object.text, " has no ", std::string(attribute)));
    return *value;
  }
  // torch.Size, which is called with one tuple; or a plain tuple.
  std::vector<int64_t> sizes(const PickleValue& value) const {
    const PickleValue* list = &value;
    if (value.is_object("torch.Size") && value.items.size() == 1) list = value.items[0];
    check(list->is_sequence() && list->items.size() <= 8, "a shape is no tuple of numbers");
    std::vector<int64_t> out;
    for (const PickleValue* item : list->items) {
      check(item->is(Kind::kInt) && item->integer >= 0, "a shape is no tuple of numbers");
      out.push_back(item->integer);
    }
    return out;
  }

  Pickle read_metadata() const {
    const std::string text = read_file(name_);
    Pickle pickled({reinterpret_cast<const std::byte*>(text.data()), text.size()}, name_,
                   is_metadata_name);
    check(pickled.root().is_object("torch.distributed.checkpoint.metadata.Metadata"),
          "holds no Metadata");
    return pickled;
  }

  void read_items() {
    for (const auto& [index, info] :
         member(metadata_.root(), "storage_data", Kind::kDict).entries) {
      check(index->is_object("torch.distributed.checkpoint.metadata.MetadataIndex") &&
                info->is_object("torch.distributed.checkpoint.filesystem._StorageInfo"),
            "storage_data holds something else than places");
      const PickleValue* offset = index->attribute("offset");
      const PickleValue* transforms = info->attribute("transform_descriptors");
      const std::string key = member(*index, "fqn", Kind::kText).text;
      MEGATRON_CHECK(transforms == nullptr || transforms->is(Kind::kNone), name_, ": ", key,
                     " is stored transformed (compressed), which is not built");
      Item item{member(*info, "relative_path", Kind::kText).text, 0, 0};
      const int64_t begin = member(*info, "offset", Kind::kInt).integer,
                    length = member(*info, "length", Kind::kInt).integer;
      check(begin >= 0 && length >= 0 && begin <= INT64_MAX - length,
            cat(key, " lies at impossible bytes"));
      MEGATRON_CHECK(!item.file.empty() && fs::path(item.file).filename() == fs::path(item.file),
                     name_, ": ", key, " lies in \"", item.file,
                     "\", which is no name of a file in the folder");
      item.offset = static_cast<uint64_t>(begin);
      item.length = static_cast<uint64_t>(length);
      std::vector<int64_t> place;
      if (offset != nullptr && !offset->is(Kind::kNone)) place = sizes(*offset);
      items_[key][place] = std::move(item);
    }
  }

  const InputFile& file(const std::string& name) {
    std::unique_ptr<InputFile>& file = files_[name];
    if (!file) file = std::make_unique<InputFile>(directory_ / name);
    return *file;
  }
  int file_index(const std::string& name) {
    const auto [found, inserted] =
        file_numbers_.try_emplace(name, static_cast<int>(file_numbers_.size()));
    return found->second;
  }

  void add_tensor(const std::string& key, const PickleValue& value) {
    StoredTensor tensor;
    tensor.shape = sizes(*require(value, "size", key));
    const PickleValue& properties = *require(value, "properties", key);
    // (dtype, layout, requires_grad, memory_format, pin_memory), or as attributes in older files
    const PickleValue* dtype = properties.attribute("dtype");
    if (dtype == nullptr && properties.state != nullptr && properties.state->is_sequence() &&
        !properties.state->items.empty())
      dtype = properties.state->items[0];
    check(dtype != nullptr && dtype->is(Kind::kName), cat(key, " has no element type"));
    const std::optional<DType> known = dtype_of_name(dtype->text);
    MEGATRON_CHECK(known, name_, ": ", key, " is stored as ", dtype->text, ", which is not built");
    tensor.dtype = *known;
    const PickleValue& chunks = *require(value, "chunks", key);
    check(chunks.is_sequence(), cat(key, " has no chunks"));
    for (const PickleValue* chunk : chunks.items) {
      Fragment fragment;
      fragment.box.offset = sizes(*require(*chunk, "offsets", key));
      fragment.box.shape = sizes(*require(*chunk, "sizes", key));
      const auto places = items_.find(key);
      const Item* item = nullptr;
      if (places != items_.end())
        if (const auto found = places->second.find(fragment.box.offset);
            found != places->second.end())
          item = &found->second;
      check(item != nullptr, cat(key, " has a chunk at ",
                                 nlohmann::json(fragment.box.offset).dump(), " that lies nowhere"));
      const ArchivedTensor archived =
          read_archived_tensor(file(item->file), item->offset, item->length,
                               cat((directory_ / item->file).string(), ": ", key, " at ",
                                   nlohmann::json(fragment.box.offset).dump()));
      MEGATRON_CHECK(archived.shape == fragment.box.shape && archived.dtype == tensor.dtype, name_,
                     ": ", key, " at ", nlohmann::json(fragment.box.offset).dump(), " is ",
                     nlohmann::json(fragment.box.shape).dump(), " ", to_string(tensor.dtype),
                     ", in its file it is ", nlohmann::json(archived.shape).dump(), " ",
                     to_string(archived.dtype));
      fragment.file = file_index(item->file);
      fragment.offset = archived.offset;
      fragment.flat_end = fragment.box.num_elements();
      tensor.fragments.push_back(std::move(fragment));
    }
    manifest_.tensors[key] = std::move(tensor);
  }
  const PickleValue* require(const PickleValue& object, std::string_view attribute,
                             const std::string& key) const {
    const PickleValue* value = object.attribute(attribute);
    check(value != nullptr, cat(key, " has no ", std::string(attribute)));
    return value;
  }

  void add_files() {
    manifest_.files.resize(file_numbers_.size());
    for (const auto& [name, number] : file_numbers_) {
      StoredFile& stored = manifest_.files[static_cast<size_t>(number)];
      stored.name = name;
      stored.bytes = file(name).size();
      stored.has_checksums = false;
    }
  }

  // Only plain values of args and the rest are used: the classes of other values do not matter.
  Pickle read_common() {
    const auto any = [](std::string_view) { return true; };
    const auto object = items_.find(std::string(kCommonObject));
    std::error_code ignored;
    if (object != items_.end() && object->second.size() == 1) {
      const Item& item = object->second.begin()->second;
      const std::string what =
          cat((directory_ / item.file).string(), ": ", std::string(kCommonObject));
      return TorchArchive(file(item.file), item.offset, item.length, what).pickle(any).unwrapped();
    }
    if (fs::exists(directory_ / kCommonFile, ignored)) {
      const InputFile& common = file(kCommonFile);
      return TorchArchive(common, 0, common.size(), common.path().string()).pickle(any);
    }
    const std::string empty = pickle::file(pickle::dict({}));
    return Pickle({reinterpret_cast<const std::byte*>(empty.data()), empty.size()}, name_, any);
  }

  const fs::path directory_;
  const std::string name_;
  const std::function<bool(std::string_view)>& wanted_;
  const Pickle metadata_;
  std::map<std::string, std::map<std::vector<int64_t>, Item>> items_;  // by key and offset
  std::map<std::string, std::unique_ptr<InputFile>> files_;
  std::map<std::string, int> file_numbers_;
  Manifest manifest_;
  std::vector<std::string> others_;
};

}  // namespace

const char* torch_name(DType dtype) {
  for (const auto& [known, text] : kTorchTypes)
    if (known == dtype) return text;
  return "";
}

std::optional<fs::path> find_torch_dist(const fs::path& folder, std::optional<int64_t> step) {
  std::error_code ignored;
  if (folder.empty() || !fs::is_directory(folder, ignored)) return {};
  if (is_torch_dist(folder)) {
    MEGATRON_CHECK(!step, "--ckpt-step is given, but ", folder.string(), " is one checkpoint");
    return folder;
  }
  if (step) {
    const fs::path directory = folder / checkpoint_name(*step);
    return is_torch_dist(directory) ? std::optional(directory) : std::nullopt;
  }
  if (!fs::is_regular_file(folder / kLatestName, ignored)) return {};
  std::string text = read_file(folder / kLatestName);
  text.erase(std::remove_if(text.begin(), text.end(),
                            [](char c) { return c == ' ' || c == '\n' || c == '\r'; }),
             text.end());
  if (text == "release" && is_torch_dist(folder / "release")) return folder / "release";
  const std::optional<int64_t> latest = read_latest_hint(folder);
  if (!latest) return {};
  const fs::path directory = folder / checkpoint_name(*latest);
  return is_torch_dist(directory) ? std::optional(directory) : std::nullopt;
}

TorchDistFiles open_torch_dist(const fs::path& directory,
                               const std::function<bool(std::string_view)>& wanted) {
  std::error_code ignored;
  MEGATRON_CHECK(fs::is_regular_file(directory / kTorchDistMetadata, ignored), directory.string(),
                 ": has no ", kTorchDistMetadata, ", although ", kTorchDistConfig,
                 " says that it is a checkpoint");
  return Opener(directory, wanted).run();
}

struct TorchDistWriter::Impl {
  explicit Impl(const fs::path& d) : directory(d), data(d / kDataFile) {}

  // Appends an item and records its position.
  template <class Write>
  void item(const std::string& key, const std::vector<int64_t>* offset, const Write& write) {
    const uint64_t begin = data.size_bytes();
    write();
    std::vector<std::pair<std::string, std::string>> index = {
        {pickle::text("fqn"), pickle::text(key)},
        {pickle::text("offset"), offset ? size(*offset) : pickle::none()},
        {pickle::text("index"), pickle::none()}};
    const std::vector<std::pair<std::string, std::string>> info = {
        {pickle::text("relative_path"), pickle::text(kDataFile)},
        {pickle::text("offset"), pickle::integer(static_cast<int64_t>(begin))},
        {pickle::text("length"), pickle::integer(static_cast<int64_t>(data.size_bytes() - begin))}};
    storage.emplace_back(
        pickle::object(metadata_name("MetadataIndex"), pickle::dict(index)),
        pickle::object(pickle::name("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
                       pickle::dict(info)));
  }
  static std::string metadata_name(std::string_view name) {
    return pickle::name("torch.distributed.checkpoint.metadata", name);
  }
  static std::string size(const std::vector<int64_t>& extents) {
    std::vector<std::string> items;
    for (const int64_t extent : extents) items.push_back(pickle::integer(extent));
    const std::string tuple[] = {pickle::tuple(items)};
    return pickle::call(pickle::name("torch", "Size"), tuple);
  }

  // Completes the current tensor.
  void close_tensor() {
    if (key.empty()) return;
    const std::string layout[] = {pickle::text("torch.strided")}, format[] = {pickle::integer(0)};
    const std::string properties[] = {
        pickle::name("torch", torch_name(dtype)),
        pickle::call(pickle::name("torch.serialization", "_get_layout"), layout),
        pickle::boolean(false), pickle::call(metadata_name("_MEM_FORMAT_ENCODING"), format),
        pickle::boolean(false)};
    const std::vector<std::pair<std::string, std::string>> state = {
        {pickle::text("properties"),
         pickle::object(metadata_name("TensorProperties"), pickle::tuple(properties))},
        {pickle::text("size"), size(shape)},
        {pickle::text("chunks"), pickle::list(chunks)}};
    tensors.emplace_back(pickle::text(key), pickle::object(metadata_name("TensorStorageMetadata"),
                                                           pickle::dict(state)));
    key.clear();
    chunks.clear();
  }

  fs::path directory;
  AtomicFileWriter data;
  std::vector<std::pair<std::string, std::string>> tensors, storage;
  std::vector<std::string> chunks;
  std::string key;  // key of the current tensor
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
};

TorchDistWriter::TorchDistWriter(const fs::path& directory) {
  std::error_code ignored;
  MEGATRON_CHECK(!fs::exists(directory, ignored) || fs::is_empty(directory, ignored),
                 directory.string(), ": is not empty\nhint: give another --save");
  make_directories(directory);
  impl_ = std::make_unique<Impl>(directory);
}
TorchDistWriter::~TorchDistWriter() = default;

void TorchDistWriter::add_tensor(const std::string& key, DType dtype,
                                 const std::vector<int64_t>& global_shape, const Box& box,
                                 const void* data) {
  Impl& w = *impl_;
  if (key != w.key) {
    w.close_tensor();
    w.key = key;
    w.dtype = dtype;
    w.shape = global_shape;
  }
  MEGATRON_ASSERT(dtype == w.dtype && global_shape == w.shape);
  const auto bytes = static_cast<size_t>(box.num_elements() * size_of(dtype));
  w.item(key, &box.offset, [&] {
    const ArchiveFrame frame = frame_of_tensor(dtype, box.shape, crc32_of(0, data, bytes));
    w.data.write(frame.before);
    w.data.write(data, bytes);
    w.data.write(frame.after);
  });
  const std::vector<std::pair<std::string, std::string>> chunk = {
      {pickle::text("offsets"), Impl::size(box.offset)},
      {pickle::text("sizes"), Impl::size(box.shape)}};
  w.chunks.push_back(
      pickle::object(Impl::metadata_name("ChunkStorageMetadata"), pickle::dict(chunk)));
}

void TorchDistWriter::add_empty_object(const std::string& key) {
  Impl& w = *impl_;
  w.close_tensor();
  const std::string nothing[] = {pickle::none()};
  w.item(key, nullptr,
         [&] { w.data.write(archive_of_pickle(pickle::file(pickle::list(nothing)))); });
  w.tensors.emplace_back(
      pickle::text(key),
      pickle::object(Impl::metadata_name("BytesStorageMetadata"), pickle::dict({})));
}

void TorchDistWriter::finish(const std::string& common) {
  Impl& w = *impl_;
  w.close_tensor();
  w.data.commit();
  const std::vector<std::pair<std::string, std::string>> state = {
      {pickle::text("state_dict_metadata"), pickle::dict(w.tensors)},
      {pickle::text("planner_data"), pickle::none()},
      {pickle::text("storage_data"), pickle::dict(w.storage)},
      {pickle::text("storage_meta"), pickle::none()},
      {pickle::text("mcore_data"), pickle::dict({})}};
  write_file_atomically(
      w.directory / kTorchDistMetadata,
      pickle::file(pickle::object(Impl::metadata_name("Metadata"), pickle::dict(state))));
  write_file_atomically(w.directory / kCommonFile, archive_of_pickle(pickle::file(common)));
  write_file_atomically(
      w.directory / kTorchDistConfig,
      R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1})");
}

std::vector<std::string> TorchDistWriter::files() const {
  return {kDataFile, kTorchDistMetadata, kCommonFile, kTorchDistConfig};
}

}  // namespace megatron
