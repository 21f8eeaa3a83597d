// Reads string columns of Parquet files with Arrow, behind a C interface (parquet_api.h).
#include <arrow/api.h>
#include <arrow/io/file.h>
#include <parquet/arrow/reader.h>
#include <parquet/exception.h>
#include <parquet/properties.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megatron/datasets/parquet/parquet_api.h"

namespace {

struct Reader {
  std::unique_ptr<parquet::arrow::FileReader> file;
  std::shared_ptr<arrow::RecordBatchReader> batches;
  std::vector<std::string> columns;
  std::vector<std::string> text;           // per column
  std::vector<std::vector<int64_t>> ends;  // per column
  int64_t rows_done = 0, rows_total = 0;
};

void check(const arrow::Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

template <class T>
T check(arrow::Result<T> result) {
  check(result.status());
  return std::move(result).ValueUnsafe();
}

void set_error(const std::string& message, char* error, int64_t error_bytes) {
  std::string line = message.substr(0, message.find('\n'));
  line.resize(std::min<size_t>(line.size(), error_bytes - 1));
  std::memcpy(error, line.c_str(), line.size() + 1);
}

std::string column_names(const arrow::Schema& schema) {
  std::string out;
  for (const auto& field : schema.fields()) out += (out.empty() ? "" : ", ") + field->name();
  return out;
}

bool all_columns(const std::vector<std::string>& names) {
  return names == std::vector<std::string>{"*"} || names == std::vector<std::string>{"**"};
}

bool holds_bytes(const arrow::DataType& type) {
  if (type.id() == arrow::Type::BINARY || type.id() == arrow::Type::LARGE_BINARY) return true;
  for (const auto& field : type.fields())
    if (holds_bytes(*field->type())) return true;
  return false;
}

// Indices of the leaf columns `names`, which must be strings.
std::vector<int> find_columns(const arrow::Schema& schema, const parquet::SchemaDescriptor& leaves,
                              const std::vector<std::string>& names) {
  std::vector<int> out;
  if (all_columns(names)) {
    for (const auto& field : schema.fields())
      if (names[0] == "*" && holds_bytes(*field->type()))
        throw std::runtime_error("column \"" + field->name() + "\" is " +
                                 field->type()->ToString() + ", which has no form in JSON");
    for (int i = 0; i < leaves.num_columns(); ++i) out.push_back(i);
    return out;
  }
  for (const std::string& name : names) {
    const auto field = schema.GetFieldByName(name);
    if (!field)
      throw std::runtime_error("has no column \"" + name + "\"; its columns are " +
                               column_names(schema));
    const auto id = field->type()->id();
    if (id != arrow::Type::STRING && id != arrow::Type::LARGE_STRING)
      throw std::runtime_error("column \"" + name + "\" is " + field->type()->ToString() +
                               ", expected string");
    for (int i = 0; i < leaves.num_columns(); ++i)
      if (leaves.Column(i)->path()->ToDotString() == name) out.push_back(i);
  }
  return out;
}

std::unique_ptr<Reader> open(const char* path, std::vector<std::string> columns,
                             int64_t batch_bytes) {
  auto reader = std::make_unique<Reader>();
  reader->columns = std::move(columns);
  auto properties = parquet::default_reader_properties();
  properties.enable_buffered_stream();  // column chunks are not read as a whole
  auto source = check(arrow::io::ReadableFile::Open(path));
  parquet::arrow::FileReaderBuilder builder;
  check(builder.Open(source, properties));
  const auto metadata = builder.raw_reader()->metadata();
  reader->rows_total = metadata->num_rows();
  int64_t bytes = 0;
  for (int g = 0; g < metadata->num_row_groups(); ++g)
    bytes += metadata->RowGroup(g)->total_byte_size();
  const int64_t row_bytes = std::max<int64_t>(1, bytes / std::max<int64_t>(1, reader->rows_total));
  parquet::ArrowReaderProperties arrow_properties;
  arrow_properties.set_pre_buffer(false);
  arrow_properties.set_batch_size(std::clamp<int64_t>(batch_bytes / row_bytes, 1, 4096));
  reader->file = check(builder.properties(arrow_properties)->Build());
  std::shared_ptr<arrow::Schema> schema;
  check(reader->file->GetSchema(&schema));
  const auto indices = find_columns(*schema, *metadata->schema(), reader->columns);
  std::vector<int> groups(metadata->num_row_groups());
  for (size_t g = 0; g < groups.size(); ++g) groups[g] = static_cast<int>(g);
  reader->batches = check(reader->file->GetRecordBatchReader(groups, indices));
  return reader;
}

template <class Array>
void append_values(const Array& values, const std::string& name, std::string& text,
                   std::vector<int64_t>& ends) {
  for (int64_t r = 0; r < values.length(); ++r) {
    if (values.IsNull(r))
      throw std::runtime_error("column \"" + name + "\" is null, expected a string");
    const auto view = values.GetView(r);
    text.append(view.data(), view.size());
    ends.push_back(static_cast<int64_t>(text.size()));
  }
}

void append_json_text(std::string_view text, std::string& out) {
  constexpr char kHex[] = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out += kHex[static_cast<unsigned char>(c) >> 4];
      out += kHex[c & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

// Bytes as "data:;base64,...".
void append_json_bytes(std::string_view bytes, std::string& out) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  out += "\"data:;base64,";
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t k = 0; k < 3; ++k)
      bits = bits << 8 | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0U);
    for (size_t k = 0; k < 4; ++k)
      out += i + k <= bytes.size() ? kDigits[bits >> (18 - 6 * k) & 63] : '=';
  }
  out += '"';
}

void append_json(const arrow::Array& values, int64_t r, const std::string& name, std::string& out);

template <class Array>
void append_json_list(const Array& list, int64_t r, const std::string& name, std::string& out) {
  const auto items = list.value_slice(r);
  out += '[';
  for (int64_t i = 0; i < items->length(); ++i) {
    if (i > 0) out += ',';
    append_json(*items, i, name, out);
  }
  out += ']';
}

template <class Field>
void append_json_object(int num_fields, const Field& field, int64_t r, std::string& out) {
  out += '{';
  bool first = true;
  for (int f = 0; f < num_fields; ++f) {
    const auto& [name, values] = field(f);
    if (values->IsNull(r) && name != "content") continue;
    if (!first) out += ',';
    first = false;
    append_json_text(name, out);
    out += ':';
    append_json(*values, r, name, out);
  }
  out += '}';
}

// Element r as JSON.
void append_json(const arrow::Array& values, int64_t r, const std::string& name, std::string& out) {
  if (values.IsNull(r)) {
    out += "null";
    return;
  }
  switch (values.type_id()) {
    case arrow::Type::STRING:
      return append_json_text(static_cast<const arrow::StringArray&>(values).GetView(r), out);
    case arrow::Type::LARGE_STRING:
      return append_json_text(static_cast<const arrow::LargeStringArray&>(values).GetView(r), out);
    case arrow::Type::BINARY:
      return append_json_bytes(static_cast<const arrow::BinaryArray&>(values).GetView(r), out);
    case arrow::Type::LARGE_BINARY:
      return append_json_bytes(static_cast<const arrow::LargeBinaryArray&>(values).GetView(r), out);
    case arrow::Type::BOOL:
      out += static_cast<const arrow::BooleanArray&>(values).Value(r) ? "true" : "false";
      return;
    case arrow::Type::LIST:
      return append_json_list(static_cast<const arrow::ListArray&>(values), r, name, out);
    case arrow::Type::LARGE_LIST:
      return append_json_list(static_cast<const arrow::LargeListArray&>(values), r, name, out);
    case arrow::Type::STRUCT: {
      const auto& rows = static_cast<const arrow::StructArray&>(values);
      return append_json_object(
          rows.num_fields(),
          [&](int f) { return std::pair(rows.type()->field(f)->name(), rows.field(f)); }, r, out);
    }
    case arrow::Type::INT8:
    case arrow::Type::INT16:
    case arrow::Type::INT32:
    case arrow::Type::INT64:
    case arrow::Type::UINT8:
    case arrow::Type::UINT16:
    case arrow::Type::UINT32:
    case arrow::Type::UINT64:
    case arrow::Type::FLOAT:
    case arrow::Type::DOUBLE:
      out += check(values.GetScalar(r))->ToString();
      return;
    default:
      throw std::runtime_error("column \"" + name + "\" is " + values.type()->ToString() +
                               ", which has no form in JSON");
  }
}

int64_t next(Reader& reader) {
  std::shared_ptr<arrow::RecordBatch> batch;
  do {
    check(reader.batches->ReadNext(&batch));
    if (!batch) return 0;
  } while (batch->num_rows() == 0);
  reader.text.assign(reader.columns.size(), {});
  reader.ends.assign(reader.columns.size(), {});
  if (all_columns(reader.columns)) {
    for (int64_t r = 0; r < batch->num_rows(); ++r) {
      append_json_object(
          batch->num_columns(),
          [&](int f) { return std::pair(batch->column_name(f), batch->column(f)); }, r,
          reader.text[0]);
      reader.ends[0].push_back(static_cast<int64_t>(reader.text[0].size()));
    }
    reader.rows_done += batch->num_rows();
    return batch->num_rows();
  }
  for (size_t c = 0; c < reader.columns.size(); ++c) {
    const auto column = batch->GetColumnByName(reader.columns[c]);
    if (column->type_id() == arrow::Type::LARGE_STRING) {
      append_values(static_cast<const arrow::LargeStringArray&>(*column), reader.columns[c],
                    reader.text[c], reader.ends[c]);
    } else {
      append_values(static_cast<const arrow::StringArray&>(*column), reader.columns[c],
                    reader.text[c], reader.ends[c]);
    }
  }
  reader.rows_done += batch->num_rows();
  return batch->num_rows();
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void* megatron_parquet_open(const char* path,
                                                                   const char* const* columns,
                                                                   int num_columns,
                                                                   int64_t batch_bytes, char* error,
                                                                   int64_t error_bytes) {
  try {
    return open(path, {columns, columns + num_columns}, batch_bytes).release();
  } catch (const std::exception& problem) {
    set_error(problem.what(), error, error_bytes);
    return nullptr;
  }
}

__attribute__((visibility("default"))) int64_t megatron_parquet_next(void* handle,
                                                                     const char** data,
                                                                     const int64_t** ends,
                                                                     double* progress, char* error,
                                                                     int64_t error_bytes) {
  auto& reader = *static_cast<Reader*>(handle);
  try {
    const int64_t rows = next(reader);
    for (size_t c = 0; c < reader.columns.size() && rows > 0; ++c) {
      data[c] = reader.text[c].data();
      ends[c] = reader.ends[c].data();
    }
    *progress = reader.rows_total > 0
                    ? static_cast<double>(reader.rows_done) / static_cast<double>(reader.rows_total)
                    : 1.0;
    return rows;
  } catch (const std::exception& problem) {
    set_error(problem.what(), error, error_bytes);
    return -1;
  }
}

__attribute__((visibility("default"))) void megatron_parquet_close(void* handle) {
  delete static_cast<Reader*>(handle);
}
}
