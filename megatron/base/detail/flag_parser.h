// Shared by command line and YAML parsing: which text sets which field, and the results so far.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "megatron/base/field_info.h"
#include "megatron/base/parse.h"

namespace megatron {

class FlagParser {
 public:
  FlagParser(std::span<Config* const> configs, std::span<const KnownFlag> known,
             std::span<const RefusedValue> refused_values = {});
  FlagParser(const FlagParser&) = delete;  // the maps point into fields_
  FlagParser& operator=(const FlagParser&) = delete;

  // A field, and the value that one of its flags sets if it is a bool.
  struct Target {
    const FieldInfo* field = nullptr;
    bool sense = true;
  };

  Target find_flag(const std::string& flag) const;  // "--num-layers"
  // "num_layers", or a flag's spelling without the dashes
  Target find_key(const std::string& key) const;
  const KnownFlag* find_known(const std::string& flag) const;

  // Parses and stores a value. `what` names its origin in messages.
  void set(const Target& target, const std::string& what, std::span<const std::string> texts);
  void set_value(const Target& target, FieldValue value) {
    values[target.field->name] = std::move(value);
  }

  // Checks the values of a flag of the known table and stores it for judge_known(). `off`: the
  // values switch it off (null or false in YAML).
  void note_known(const KnownFlag& known, const std::string& what,
                  std::span<const std::string> texts, bool off);

  bool has_given(const KnownFlag& known) const;

  // Accepts or refuses the flags of the known table, once all values are set.
  void judge_known(const std::function<FlagVerdict(const KnownFlag&)>& judge);

  // "; did you mean --x?" or "".
  std::string suggestion(const std::string& flag) const;
  void also_suggest(const char* flag) { suggestions_.push_back(flag); }

  // Reads a YAML file. Keys in `keep` (names of fields) are read and checked, but not assigned.
  // Returns false, after adding a violation, if there is no such file or it is not YAML.
  bool read_yaml_file(const std::string& path, const std::set<std::string>& keep,
                      bool ignore_unknown);

  const std::vector<FieldInfo>& fields() const { return fields_; }
  const std::map<std::string, Target>& flags() const { return flags_; }

  std::map<std::string, FieldValue> values;  // by field name
  std::set<std::string> failed;              // names of fields whose value could not be read
  std::vector<std::pair<std::string, std::string>> already_so;
  Violations violations;

 private:
  struct GivenFlag {
    const KnownFlag* known;
    std::string what;  // flag with its values
    bool off;
  };

  const RefusedValue* refused_value(const FieldInfo& field,
                                    std::span<const std::string> texts) const;

  std::vector<GivenFlag> given_known_;
  std::span<const RefusedValue> refused_values_;
  std::vector<FieldInfo> fields_;
  std::map<std::string, Target> flags_;
  std::map<std::string, const FieldInfo*> names_;
  std::map<std::string, const KnownFlag*> known_;
  std::vector<std::string> suggestions_;
};

}  // namespace megatron
