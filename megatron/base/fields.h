// Describes a configuration struct once. Flags, --help, YAML, JSON, checkpoint metadata and
// docs/flags.md are visitors over that one list.
//
// Goals: a new flag is one member and one line in fields(); every violation is reported at once.
// Non-goals: nested structures, schema evolution. docs/design/configuration.md
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace megatron {

// The spelling of a field. `name` is the member's name (and the key in YAML and JSON); the flag is
// the name with dashes unless `flags` lists spellings, separated by one space, the first of which
// is shown.
struct FieldName {
  constexpr FieldName(const char* name) : name(name) {}  // NOLINT: implicit by design
  constexpr FieldName(const char* name, const char* flags, bool negative = false)
      : name(name), flags(flags), negative(negative) {}
  std::string_view name;
  std::string_view flags = {};
  bool negative = false;  // giving the flag sets a bool to false (--disable-bias-linear, --no-x)
};

// What a field decides. Lists of fields follow from it, not from names.
enum class FieldRole {
  kArchitecture,  // which function the stored weights compute
  kNumerics,      // what a training step computes beyond it: data seen, types, losses, rates
  kRun,           // what a run does around its steps: sources of data, length, folders, logs
  kMachine,       // where and how it is computed: ranks, kernels, memory
};

// The value of a field that is no choice, in the order of FieldKind (field_info.h).
using FieldRef = std::variant<bool*, int64_t*, double*, std::string*, std::optional<int64_t>*,
                              std::optional<double>*, std::vector<int64_t>*, std::vector<double>*,
                              std::vector<std::string>*>;

// Visits each field with its name, its value (read or written) and its help, in the order of
// declaration.
class FieldVisitor {
 public:
  virtual ~FieldVisitor() = default;
  // Starts a named group ("network size"), or continues it; shown in --help and docs/flags.md.
  virtual void group(std::string_view title) = 0;
  // Lists the fields that follow, up to the next group(), behind this one of the same struct.
  virtual void list_after(std::string_view) {}
  // The role of the fields that follow in this struct; kRun until the first call.
  virtual void role(FieldRole) {}
  template <class T>
  void field(FieldName name, T& value, std::string_view help) {
    visit(name, &value, help);
  }
  virtual void visit(FieldName name, FieldRef value, std::string_view help) = 0;
  // Enums are represented by an index into their spellings.
  virtual void choice(FieldName name, int& index, std::span<const std::string_view> spellings,
                      std::string_view help) = 0;
  template <class E>
  void choice(FieldName name, E& value, std::span<const std::string_view> spellings,
              std::string_view help) {
    int index = static_cast<int>(value);
    choice(name, index, spellings, help);
    value = static_cast<E>(index);
  }
};

// Collects violations, so that all of them are reported at once.
class Violations {
 public:
  // One violation: in the form of error messages in docs/architecture.md; `hint` names legal
  // values.
  void add(std::string message, std::string hint = {});
  // The same unless `ok`.
  void require(bool ok, std::string message, std::string hint = {}) {
    if (!ok) add(std::move(message), std::move(hint));
  }
  bool empty() const { return messages_.empty(); }
  const std::vector<std::string>& messages() const { return messages_; }
  // Throws UsageError with all messages, if there are any.
  void throw_if_any() const;

 private:
  std::vector<std::string> messages_;
};

struct Config {
  virtual ~Config() = default;
  // The single source of names, order and help.
  virtual void fields(FieldVisitor& visitor) = 0;
  // Adds one violation for each broken rule of this struct.
  virtual void validate(Violations&) const {}
};

}  // namespace megatron
