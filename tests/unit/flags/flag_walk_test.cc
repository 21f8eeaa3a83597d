// Every flag of Megatron-LM under six configurations: it is a field that changes the resolved
// configuration and that code reads, or it is accepted for a reason that holds in that run, or it
// is refused with a reason.
#include "tests/unit/flags/flag_walk.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/training/arguments/arguments.h"
#include "megatron/training/planning/checkpoint_plan.h"
#include "megatron/training/planning/layout_plan.h"
#include "tests/unit/error_of.h"
#include "tests/unit/parse_line.h"

namespace megatron {
namespace {

using testing::HasSubstr;
using testing::Not;

struct Way {
  const char* name;
  const char* flags;
  int64_t ranks;
};

constexpr const char* kBase =
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 "
    "--global-batch-size 8 "
    "--train-iters 10 --lr 1e-3 --tokenizer-type ByteLevelTokenizer --mock-data ";

constexpr Way kWays[] = {
    {"one rank", "", 1},
    {"TP2", "--tensor-model-parallel-size 2 --sequence-parallel", 2},
    {"plain DP2", "", 2},
    {"ZeRO-1", "--use-distributed-optimizer", 2},
    {"PP2", "--pipeline-model-parallel-size 2", 2},
    {"CP2", "--context-parallel-size 2 --attention-dropout 0", 2},
};

// Runs in which a claim with a condition does not hold.
constexpr Way kOtherWays[] = {
    {"experts", "--num-experts 4", 1},
    {"letters", "--hybrid-layer-pattern *-*-", 1},
    {"experts on two ranks",
     "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex", 2},
    {"fast", "--fast", 1},
    {"unfused attention", "--attention-backend unfused", 1},
    {"sums in bf16", "--grad-reduce-in-bf16", 2},
    {"offloaded optimizer", "--optimizer-cpu-offload", 1},
    {"no handler", "--no-exit-signal-handler", 1},
    {"fresh", "--start-mode fresh", 1},
    {"CPU", "--device cpu", 2},
    {"latents",
     "--multi-latent-attention --position-embedding-type rope --kv-lora-rank 16 --qk-head-dim 16",
     1},
    {"plain transfers", "--pipeline-model-parallel-size 2 --no-overlap-p2p-communication", 2},
};

Arguments parse(const Way& way, const std::string& more) {
  return parse_line(cat("pretrain ", kBase, way.flags, " ", more), way.ranks);
}

std::string error_of(const Way& way, const std::string& more) {
  return megatron::error_of([&] { parse(way, more); });
}

// The files under tests/golden/flags: words of each line but those of comments.
std::vector<std::vector<std::string>> golden_lines(const char* name) {
  std::ifstream file(std::string(MEGATRON_SOURCE_DIR "/tests/golden/flags/") + name);
  std::vector<std::vector<std::string>> lines;
  for (std::string line; std::getline(file, line);)
    if (!line.starts_with('#')) lines.push_back(words(line));
  return lines;
}

std::map<std::string, const KnownFlag*> rows() {
  std::map<std::string, const KnownFlag*> out;
  for (const KnownFlag& row : flag_table())
    for (const std::string& spelling : words(row.flag)) out[spelling] = &row;
  return out;
}

const FieldInfo* owner(const std::vector<FieldInfo>& fields, const std::string& flag) {
  for (const FieldInfo& field : fields)
    if (std::find(field.flags.begin(), field.flags.end(), flag) != field.flags.end()) return &field;
  return nullptr;
}

std::vector<FieldInfo> fields_of(Arguments arguments) {
  return describe_fields(arguments.configs());
}

const SourceTree& tree() {
  static const SourceTree tree = [] {
    SourceTree read = SourceTree::read(MEGATRON_SOURCE_DIR);
    for (const FieldInfo& field : fields_of({})) read.fields.insert(field.name);
    return read;
  }();
  return tree;
}

// What the program answers in a run to a flag that no field owns.
class Asker {
 public:
  explicit Asker(const Way& way) : way_(way), rows_(rows()) {
    Arguments arguments;
    const auto configs = arguments.configs();
    for (const std::string& flag : accepted_flags(configs)) owned_.insert(flag);
  }

  Answer operator()(const std::string& flag) const {
    if (owned_.count(flag) > 0) return {Answer::Kind::kField, ""};
    const KnownFlag& row = *rows_.at(flag);
    std::string given = flag;
    const bool listed = row.kind == KnownFlag::Kind::kAlreadySo && !row.neutral.empty();
    for (int i = 0; i < row.min_values; ++i)
      given += " " + (listed ? words(row.neutral)[0] : "7777");
    try {
      const Arguments arguments = parse(way_, given);
      for (const auto& [what, reason] : arguments.already_so)
        if (what.starts_with(flag)) return {Answer::Kind::kAccepted, reason};
      return {Answer::Kind::kAccepted, ""};
    } catch (const UsageError& error) {
      std::string text = error.what();
      for (const std::string& refused : {flag, given})
        if (text.starts_with(refused + " is refused: ")) text.erase(0, text.find(": ") + 2);
      return {Answer::Kind::kRefused, text.substr(0, text.find("\nhint: "))};
    }
  }

 private:
  Way way_;
  std::set<std::string> owned_;  // by fields
  std::map<std::string, const KnownFlag*> rows_;
};

TEST(FlagWalk, EveryAnswerIsTrueInEveryWayOfRunning) {
  const auto table = rows();
  auto options = golden_lines("megatron_flags.txt");
  ASSERT_EQ(options.size(), 838u);
  std::ranges::move(golden_lines("multimodal_flags.txt"), std::back_inserter(options));
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    ASSERT_EQ(error_of(way, ""), "");
    const Ask ask = Asker(way);
    int count[3] = {};
    for (const auto& line : options) {
      for (size_t i = 2; i < line.size(); ++i) {
        const Answer answer = ask(line[i]);
        if (i == 2) ++count[static_cast<int>(answer.kind)];
        if (answer.kind == Answer::Kind::kField) continue;
        EXPECT_EQ(fault_of(*table.at(line[i]), line[i], answer, ask, tree()), "")
            << line[i] << " (" << way.name << "): " << answer.reason;
      }
    }
    std::printf("%s: %d fields, %d already so, %d refused\n", way.name, count[0], count[1],
                count[2]);
  }
}

// A condition that never fails, or always does, is none.
TEST(FlagWalk, ConditionsHoldInSomeRunsAndFailInOthers) {
  for (const KnownFlag& row : flag_table()) {
    if (row.claim == nullptr || row.claim->holds == nullptr) continue;
    int held = 0, failed = 0;
    const auto look = [&](const Way& way) { ++(row.claim->holds(parse(way, "")) ? held : failed); };
    for (const Way& way : kWays) look(way);
    for (const Way& way : kOtherWays) look(way);
    EXPECT_GT(held, 0) << row.flag;
    EXPECT_GT(failed, 0) << row.flag;
  }
}

// What the plan of a checkpoint says, without the table.
TEST(FlagWalk, WhoWritesCheckpointsIsWhatThePlanSays) {
  for (const Way& way : kWays) {
    if (way.ranks == 1 || std::string_view(way.name) == "TP2" ||
        std::string_view(way.name) == "PP2")
      continue;
    const Arguments arguments = parse(way, "");
    const CheckpointPlan plan =
        make_checkpoint_plan(make_layout_plan(arguments, {257, 512}, false));
    const bool divided =
        std::count_if(plan.bytes.begin(), plan.bytes.end(), [](int64_t n) { return n > 0; }) > 1;
    const Ask ask = Asker(way);
    EXPECT_EQ(ask("--ckpt-fully-parallel-save").kind == Answer::Kind::kAccepted, divided)
        << way.name;
    EXPECT_EQ(ask("--no-ckpt-fully-parallel-save").kind == Answer::Kind::kAccepted, !divided)
        << way.name;
  }
}

// -- fields

// Values to try for a field, as given after its flag; those that are its default come back in the
// resolved configuration.
std::vector<std::string> candidates(const FieldInfo& field) {
  switch (field.kind) {
    case FieldKind::kBool:
      return {std::get<bool>(field.value) ? "false" : "true"};
    case FieldKind::kInt:
    case FieldKind::kOptionalInt:
      return {"2", "1", "4", "8", "16", "64", "0", "256"};
    case FieldKind::kDouble:
    case FieldKind::kOptionalDouble:
      return {"0.5", "0.25", "2", "0.0001", "8", "1"};
    case FieldKind::kString:
      return {"some-text"};
    case FieldKind::kIntList:
      return {"1 2", "2", "1"};
    case FieldKind::kDoubleList:
      return {"0.5 0.5", "0.5"};
    case FieldKind::kStringList:
      return {"some-text"};
    case FieldKind::kChoice:
      return field.spellings;
  }
  return {};
}

// A flag of a field, when it is accepted with another value than the field has without it, changes
// the field, or a reason is printed.
TEST(FlagWalk, FlagsOfFieldsChangeTheConfiguration) {
  std::set<std::string> accepted, all;
  // As declared, before anything is derived from other values
  std::map<std::string, std::string> defaults;
  for (const FieldInfo& field : fields_of({})) defaults[field.name] = format_value(field.value);
  for (const Way& way : kWays) {
    const Arguments before = parse(way, "");
    for (const FieldInfo& field : fields_of(before)) {
      all.insert(field.name);
      for (const std::string& value : candidates(field)) {
        if (value == format_value(field.value) || value == defaults[field.name]) continue;
        const bool off = field.kind == FieldKind::kBool && field.negative;
        const std::string flag = field.flags[0];
        const std::string given =
            cat(flag, " ", off ? (value == "true" ? "false" : "true") : value);
        Arguments after;
        try {
          after = parse(way, given);
        } catch (const Error&) {
          continue;
        }
        accepted.insert(field.name);
        const bool told =
            std::any_of(after.already_so.begin(), after.already_so.end(),
                        [&](const auto& note) { return note.first.starts_with(flag); });
        EXPECT_TRUE(told || resolved_yaml(after) != resolved_yaml(before))
            << given << " (" << way.name << ") is accepted and changes nothing";
        break;
      }
    }
  }
  for (const std::string& name : all)
    if (accepted.count(name) == 0) std::printf("never accepted alone: %s\n", name.c_str());
}

// Every value that Megatron offers for a flag of a field is taken, or refused with a reason; "not
// one of its values" is none.
TEST(FlagWalk, ValuesOfMegatronAreTakenOrRefusedWithAReason) {
  const std::vector<FieldInfo> fields = fields_of({});
  int tried = 0;
  for (const auto& line : golden_lines("megatron_choices.txt")) {
    if (owner(fields, line[0]) == nullptr) continue;
    for (size_t i = 1; i < line.size(); ++i, ++tried)
      EXPECT_THAT(error_of(kWays[0], line[0] + " " + line[i]),
                  Not(HasSubstr("is not one of its values")))
          << line[0];
  }
  EXPECT_GT(tried, 60);
}

// Fields that nobody outside of their own files reads by name: who reads them for the others.
struct Reader {
  const char* field;
  const char* path;
  const char* function;
};

constexpr Reader kReaders[] = {
    {"quick_geglu", "megatron/transformer/config/transformer_config.cc", "activation"},
    {"fp8_margin", "megatron/transformer/config/precision.cc", "quantization"},
    {"fp8_amax_history_len", "megatron/transformer/config/precision.cc", "quantization"},
    {"fp8_amax_compute_algo", "megatron/transformer/config/precision.cc", "quantization"},
    {"fp8_wgrad", "megatron/transformer/config/precision.cc", "quantization"},
    {"first_last_layers_bf16", "megatron/transformer/config/precision.cc", "quantization"},
    {"num_layers_at_end_in_bf16", "megatron/transformer/config/precision.cc", "quantization"},
    {"lr_factors", "megatron/optimizer/config/learning_rate.cc", "rate_factors"},
    {"rope_type", "megatron/transformer/config/multi_latent_attention.h", "stretches_positions"},
    {"mscale", "megatron/transformer/config/multi_latent_attention.cc", "rotary_magnitude"},
    {"mscale_all_dim", "megatron/transformer/config/multi_latent_attention.cc", "score_magnitude"},
    {"mamba_num_heads", "megatron/transformer/config/mamba.h", "mamba_heads"},
    {"mamba_dt_limit", "megatron/transformer/config/mamba.cc", "time_step_limits"},
    {"mtp_use_repeated_layer", "megatron/transformer/config/multi_token_prediction.h",
     "mtp_distinct_layers"},
    {"recompute_activations", "megatron/transformer/config/recompute.cc", "finalize"},
    {"moe_layer_recompute", "megatron/transformer/config/recompute.cc", "finalize"},
    {"fine_grained_activation_offloading", "megatron/transformer/config/offload.cc", "offloads"},
    {"offload_modules", "megatron/transformer/config/offload.cc", "offloads"},
    {"activation_offload_fraction", "megatron/transformer/config/offload.cc",
     "num_offloaded_layers"},
    {"tiktoken_pattern", "megatron/tokenizers/tokenizer.cc", "make_tokenizer"},
    {"tiktoken_num_special_tokens", "megatron/tokenizers/tokenizer.cc", "make_tokenizer"},
    {"vocab_extra_ids", "megatron/tokenizers/tokenizer.cc", "make_tokenizer"},
    {"null_tokenizer_eod_id", "megatron/tokenizers/tokenizer.cc", "make_tokenizer"},
    {"null_tokenizer_pad_id", "megatron/tokenizers/tokenizer.cc", "make_tokenizer"},
    {"pad_vocab_size", "megatron/tokenizers/tokenizer.cc", "padded_vocab_size"},
    {"zero_bubble_max_pending_backward", "megatron/pipeline_parallel/pipeline_config.cc", "shape"},
    {"use_distributed_optimizer", "megatron/distributed/distributed_data_parallel_config.cc",
     "strategy"},
    {"use_megatron_fsdp", "megatron/distributed/distributed_data_parallel_config.cc", "strategy"},
    {"data_parallel_sharding_strategy", "megatron/distributed/distributed_data_parallel_config.cc",
     "strategy"},
    {"distributed_timeout_minutes", "megatron/comm/rendezvous.h", "timeout_seconds"},
    {"distributed_timeout_seconds_after_init", "megatron/comm/rendezvous.h",
     "timeout_seconds_after_init"},
    {"distributed_backend", "megatron/comm/rendezvous.cc", "connect"},
    {"distributed_interface", "megatron/comm/rendezvous.cc", "connect"},
    {"freeze_all_layers", "megatron/training/arguments/config/start.cc", "freezes"},
    {"freeze_lm", "megatron/training/arguments/config/start.cc", "finalize"},
    {"freeze_vit", "megatron/training/arguments/config/start.cc", "finalize"},
    {"freeze_vision_projection", "megatron/training/arguments/config/start.cc", "finalize"},
    {"exit_signal", "megatron/training/arguments/config/exit.cc", "exit_signal_number"},
    {"mask_prob", "megatron/datasets/masked/masked_data_config.cc", "masking"},
    {"masking_max_ngram", "megatron/datasets/masked/masked_data_config.cc", "masking"},
    {"masking_whole_word", "megatron/datasets/masked/masked_data_config.cc", "masking"},
    {"masking_longer_ngrams", "megatron/datasets/masked/masked_data_config.cc", "masking"},
    {"masking_geometric", "megatron/datasets/masked/masked_data_config.cc", "masking"},
    {"mlm_replace", "megatron/datasets/masked/masked_data_config.cc", "masking"},
    {"bert_token_types", "megatron/models/bert/bert_model.cc", "num_token_types"},
    {"bert_lm_head", "megatron/models/bert/bert_model.cc", "has_lm_head"},
    {"bert_pooler", "megatron/models/bert/bert_model.cc", "has_pooler"},
    {"bert_classes", "megatron/models/bert/bert_model.cc", "num_classes"},
    {"bert_choices", "megatron/models/bert/bert_model.cc", "num_choices"},
    {"retro_encoder_hidden_dropout", "megatron/models/retro/retro_config.cc", "retro_stacks"},
    {"retro_encoder_attention_dropout", "megatron/models/retro/retro_config.cc", "retro_stacks"},
    {"encoder_recompute_granularity", "megatron/models/common/encoder_recompute.h",
     "recomputes_encoders"},
    {"encoder_recompute_method", "megatron/models/common/encoder_recompute.cc", "recomputing"},
    {"recompute_vision", "megatron/models/common/encoder_recompute.h", "recomputes_encoders"},
    {"encoder_offload_modules", "megatron/models/common/encoder_offload.cc", "offloading"},
    {"mimo_encoder_prefetch", "megatron/models/common/encoder_prefetch.h", "microbatches_ahead"},
    {"mimo_encoder_prefetch_depth", "megatron/models/common/encoder_prefetch.h",
     "microbatches_ahead"},
};

// Fields of which one value is built: the others are refused.
struct OneValue {
  const char* field;
  const char* others;  // flag and value
};

constexpr OneValue kOneValue[] = {
    {"fp4_recipe", "--fp4-recipe custom --fp4-format e2m1 --bf16"},
    {"main_grads_dtype", "--main-grads-dtype bf16"},
    {"expert_model_parallel_size", "--expert-model-parallel-size 2"},
    // Says that a folder of choices is given, and is refused without one.
    {"moe_enable_routing_replay", "--moe-enable-routing-replay"},
    // Says that states may have other types than fp32, which are refused without it.
    {"use_precision_aware_optimizer", "--bf16 --exp-avg-dtype bf16"},
};

// "megatron/training/arguments/config/exit.cc" and ".h" for a field that they visit.
std::set<std::string> files_of(const std::string& field) {
  std::set<std::string> owners;
  for (const auto& [path, text] : tree().code) {
    const bool visits = text.find("fields(FieldVisitor") != std::string::npos;
    if (!visits || text.find("\"" + field + "\"") == std::string::npos) continue;
    const std::string stem = path.substr(0, path.rfind('.'));
    owners.insert({stem + ".cc", stem + ".h"});
  }
  return owners;
}

// A field that nobody reads is a flag that is accepted and does nothing.
TEST(FlagWalk, EveryFieldIsRead) {
  for (const FieldInfo& field : fields_of({})) {
    const std::string& name = field.name;
    const std::set<std::string> owners = files_of(name);
    EXPECT_FALSE(owners.empty()) << name;
    const auto* one = std::find_if(std::begin(kOneValue), std::end(kOneValue),
                                   [&](const OneValue& o) { return name == o.field; });
    if (one != std::end(kOneValue)) {
      EXPECT_NE(error_of(kWays[0], one->others), "") << one->others;
      continue;
    }
    const auto* reader = std::find_if(std::begin(kReaders), std::end(kReaders),
                                      [&](const Reader& r) { return name == r.field; });
    if (reader == std::end(kReaders)) {
      EXPECT_TRUE(is_read_outside(tree(), name, owners)) << name << " is a flag that nobody reads";
      continue;
    }
    EXPECT_THAT(function_body(tree(), reader->path, reader->function), HasSubstr(name))
        << reader->function;
    const std::set<std::string> own = {reader->path, "megatron/training/arguments/arguments.cc",
                                       "megatron/training/arguments/parse_arguments.cc"};
    const bool is_called = std::string_view(reader->function) == "finalize" ||
                           is_read_outside(tree(), reader->function, own);
    EXPECT_TRUE(is_called) << reader->function << " is not called";
  }
}

// -- the walker itself, on rows that are wrong

constexpr FlagClaim kRight{"an integer is an integer", "source a.cc: int"};
constexpr FlagClaim kNoSuchTest{"an integer is an integer", "test No.Such"};
constexpr FlagClaim kNoSuchField{"an integer is an integer", "field no_such"};
constexpr FlagClaim kPresent{"an integer is an integer", "absent int"};
constexpr FlagClaim kWrongText{"an integer is an integer", "source a.cc: float"};
constexpr FlagClaim kWrongFile{"an integer is an integer", "source b.cc: int"};
constexpr FlagClaim kLacks{"an integer is an integer", "lacks a.cc: int"};
constexpr FlagClaim kSwitchesOff{"an integer is an integer", "refused --built"};
constexpr FlagClaim kNothing{"an integer is an integer", ""};
constexpr FlagClaim kStale{"a run has one rank, so nothing is sent", "source a.cc: int"};
constexpr FlagClaim kNoWords{"an integer is an integer", "source a.cc: int",
                             [](const Arguments&) { return true; }};
constexpr FlagClaim kGood{"an integer is an integer", "test Right.One"};

TEST(FlagWalker, FindsRowsThatAreWrong) {
  SourceTree toy;
  toy.code["a.cc"] = "int main() { return used; }";
  toy.tests = {"Right.One"};
  const Ask ask = [](const std::string& flag) {
    return Answer{flag == "--built" ? Answer::Kind::kField : Answer::Kind::kRefused, "not built"};
  };
  const auto fault = [&](const FlagClaim& claim) {
    const KnownFlag row{"--no-built", KnownFlag::Kind::kAlreadySo, claim.says, 0, 0, {}, &claim};
    return fault_of(row, "--no-built", {Answer::Kind::kAccepted, std::string(claim.says)}, ask,
                    toy);
  };
  EXPECT_EQ(fault(kRight), "");
  EXPECT_EQ(fault(kGood), "");
  EXPECT_EQ(fault(kNoSuchTest), "no test is called No.Such");
  EXPECT_EQ(fault(kNoSuchField), "no field is called no_such");
  EXPECT_EQ(fault(kPresent), "a.cc contains \"int\"");
  EXPECT_EQ(fault(kWrongText), "a.cc lacks \"float\"");
  EXPECT_EQ(fault(kWrongFile), "names no file of the tree");
  EXPECT_EQ(fault(kLacks), "a.cc contains \"int\"");
  EXPECT_EQ(fault(kSwitchesOff), "--built is not refused");
  EXPECT_EQ(fault(kNothing), "\"\" shows nothing");
  EXPECT_EQ(fault(kStale), "says \"a run has one rank\"");
  EXPECT_EQ(fault(kNoWords), "has a condition without words");
  const KnownFlag bare{"--x", KnownFlag::Kind::kAlreadySo, "an integer is an integer"};
  EXPECT_EQ(fault_of(bare, "--x", {Answer::Kind::kAccepted, "an integer is an integer"}, ask, toy),
            "is accepted, and claims nothing");
  EXPECT_EQ(fault_of(bare, "--x", {Answer::Kind::kRefused, "because of the weather"}, ask, toy),
            "is refused, but its claim holds in every run");
  const KnownFlag refused{"--x", KnownFlag::Kind::kRefused,
                          "training on several ranks is not built yet"};
  EXPECT_EQ(
      fault_of(refused, "--x", {Answer::Kind::kRefused, std::string(refused.reason)}, ask, toy),
      "says \"several ranks is not built\"");
  EXPECT_EQ(fault_of(refused, "--x", {Answer::Kind::kAccepted, "as it happens"}, ask, toy),
            "is accepted, but its row says refused");
  EXPECT_TRUE(is_read_outside(toy, "used", {"b.cc"}));
  EXPECT_FALSE(is_read_outside(toy, "used", {"a.cc"}));
  EXPECT_FALSE(is_read_outside(toy, "use", {"b.cc"})) << "part of a name";
}

}  // namespace
}  // namespace megatron
