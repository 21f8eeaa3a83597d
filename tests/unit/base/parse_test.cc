#include "megatron/base/parse.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <random>

#include "megatron/base/check.h"
#include "megatron/base/field_info.h"
#include "megatron/base/files.h"
#include "tests/unit/base/sample_config.h"

namespace megatron {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::Pair;

constexpr KnownFlag kKnown[] = {
    {"--transformer-impl", KnownFlag::Kind::kAlreadySo, "there is one implementation", 1, 1},
    {"--use-flash-attn", KnownFlag::Kind::kAlreadySo, "chosen by shape"},
    {"--async-strategy", KnownFlag::Kind::kAlreadySo, "there is one writer", 1, 1, "nvrx mcore"},
    {"--num-experts", KnownFlag::Kind::kRefused, "mixture of experts is not built", 1, 1, "0 none"},
    {"--cp-comm-type", KnownFlag::Kind::kRefused, "context parallelism is not built", 1, -1, "p2p"},
    {"--mtp-hsm --mtp-other", KnownFlag::Kind::kRefused, "multi-token prediction is not built"},
};

ParseResult parse(SampleConfig& config, std::vector<const char*> arguments,
                  ParseOptions options = {}) {
  arguments.insert(arguments.begin(), "command");
  Config* const configs[] = {&config};
  options.known = kKnown;
  return parse_flags(configs, static_cast<int>(arguments.size()), arguments.data(), options);
}

// The message of the UsageError that the arguments cause.
std::string refusal(std::vector<const char*> arguments, ParseOptions options = {}) {
  SampleConfig config;
  try {
    parse(config, std::move(arguments), std::move(options));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

// The same into `config`, which the options may look at.
std::string refusal_of(SampleConfig& config, std::vector<const char*> arguments,
                       ParseOptions options) {
  try {
    parse(config, std::move(arguments), std::move(options));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

std::string cat_number(const char* text, int64_t number) { return text + std::to_string(number); }

class ScratchFile {
 public:
  explicit ScratchFile(const std::string& text, const char* name = "parse_test.yaml")
      : path_(testing::TempDir() + name + std::to_string(::getpid())) {
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~ScratchFile() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(ParseFlags, SetsEveryKind) {
  SampleConfig c;
  const ParseResult result = parse(c, {"--num-layers",
                                       "12",
                                       "--lr=1e-3",
                                       "--save",
                                       "/tmp/x y",
                                       "--bf16",
                                       "--disable-bias-linear",
                                       "--shape",
                                       "wavy-line",
                                       "--num-query-groups=4",
                                       "--init-std",
                                       ".02",
                                       "--sizes",
                                       "1",
                                       "-2",
                                       "3",
                                       "--betas",
                                       "0.8,0.9",
                                       "--data-path",
                                       "0.3",
                                       "a,b",
                                       "c"});
  EXPECT_EQ(c.num_layers, 12);
  EXPECT_EQ(c.lr, 1e-3);
  EXPECT_EQ(c.save, "/tmp/x y");
  EXPECT_TRUE(c.bf16);
  EXPECT_FALSE(c.add_bias_linear);
  EXPECT_EQ(c.shape, Shape::kWavy);
  EXPECT_EQ(c.num_query_groups, 4);
  EXPECT_EQ(c.init_std, 0.02);
  EXPECT_THAT(c.sizes, ElementsAre(1, -2, 3));
  EXPECT_THAT(c.betas, ElementsAre(0.8, 0.9));
  EXPECT_THAT(c.data_path, ElementsAre("0.3", "a,b", "c"));
  EXPECT_EQ(result.given.size(), 11u);
  EXPECT_TRUE(result.was_given("lr"));
}

TEST(ParseFlags, DefaultsStayAndNothingIsGiven) {
  SampleConfig c;
  EXPECT_TRUE(parse(c, {}).given.empty());
  EXPECT_TRUE(c == SampleConfig());
}

TEST(ParseFlags, SwitchesTakeTrueAndFalseAndHaveOpposites) {
  const auto bf16 = [](std::vector<const char*> arguments) {
    SampleConfig c;
    c.bf16 = std::string_view(arguments[0]) == "--no-bf16" || arguments.size() > 1;
    parse(c, std::move(arguments));
    return c.bf16;
  };
  EXPECT_TRUE(bf16({"--bf16"}));
  EXPECT_TRUE(bf16({"--bf16", "true"}));
  EXPECT_FALSE(bf16({"--bf16", "false"}));
  EXPECT_FALSE(bf16({"--bf16=false", "--lr", "1"}));
  EXPECT_FALSE(bf16({"--no-bf16"}));
  const auto bias = [](std::vector<const char*> arguments, bool before) {
    SampleConfig c;
    c.add_bias_linear = before;
    parse(c, std::move(arguments));
    return c.add_bias_linear;
  };
  EXPECT_FALSE(bias({"--disable-bias-linear"}, true));
  EXPECT_TRUE(bias({"--disable-bias-linear", "false"}, false));
  EXPECT_TRUE(bias({"--add-bias-linear"}, false));
  EXPECT_TRUE(bias({"--bias-linear"}, false));
}

TEST(ParseFlags, NegativeNumbersAndSpellingsAndNone) {
  SampleConfig c;
  c.num_query_groups = 3;
  c.init_std = 1.0;
  parse(c, {"--learning-rate", "+0.25", "--num-query-groups", "none", "--init-std", "-1.5e-3"});
  EXPECT_EQ(c.lr, 0.25);
  EXPECT_EQ(c.num_query_groups, std::nullopt);
  EXPECT_EQ(c.init_std, -1.5e-3);
}

TEST(ParseFlags, ReportsEveryViolationAtOnceInOrder) {
  EXPECT_EQ(refusal({"--num-layers", "twelve", "--lr", "fast", "--shape", "squar", "--num-atention",
                     "--bf16", "maybe", "--num-experts", "8", "--lr", "1"}),
            "--num-layers \"twelve\" is not an integer\n"
            "--lr \"fast\" is not a finite number\n"
            "--shape \"squar\" is not one of its values; did you mean square?\n"
            "hint: legal values: round, square, wavy-line\n"
            "unknown flag --num-atention\n"
            "unexpected argument \"maybe\"; flags start with --\n"
            "--num-experts is refused: mixture of experts is not built\n"
            "hint: accepted values: 0, none");
}

TEST(ParseFlags, NamesWhatEachValueShouldBe) {
  EXPECT_EQ(refusal({"--num-layers"}), "--num-layers expects an integer");
  EXPECT_EQ(refusal({"--num-layers", "--bf16"}), "--num-layers expects an integer");
  EXPECT_EQ(refusal({"--num-layers="}), "--num-layers \"\" is not an integer");
  EXPECT_EQ(refusal({"--num-layers", "1.5"}), "--num-layers \"1.5\" is not an integer");
  EXPECT_EQ(refusal({"--num-layers", "99999999999999999999"}),
            "--num-layers \"99999999999999999999\" does not fit in 64 bits");
  EXPECT_EQ(refusal({"--lr", "nan"}), "--lr \"nan\" is not a finite number");
  EXPECT_EQ(refusal({"--lr", "1e999"}), "--lr \"1e999\" is outside the range of a 64-bit number");
  EXPECT_EQ(refusal({"--save"}), "--save expects a value");
  EXPECT_EQ(refusal({"--save", "\xff"}), "--save is not UTF-8 text");
  EXPECT_EQ(refusal({"--shape"}),
            "--shape expects one of its values\nhint: legal values: round, square, wavy-line");
  EXPECT_EQ(refusal({"--sizes", "--bf16"}), "--sizes expects one or more integers");
  EXPECT_EQ(refusal({"--sizes", "1,x", "y"}),
            "--sizes \"x\" is not an integer\n--sizes \"y\" is not an integer");
  EXPECT_EQ(refusal({"--bf16=maybe"}), "--bf16 \"maybe\" is neither true nor false");
  EXPECT_EQ(refusal({"--data-path"}), "--data-path expects one or more values");
}

TEST(ParseFlags, UnknownFlagsAreRefusedWithTheNearestKnownOne) {
  EXPECT_EQ(refusal({"--num-layes", "3"}), "unknown flag --num-layes; did you mean --num-layers?");
  EXPECT_EQ(refusal({"--num_layers=3"}), "unknown flag --num_layers; did you mean --num-layers?");
  EXPECT_EQ(refusal({"--tranformer-impl", "local"}),
            "unknown flag --tranformer-impl; did you mean --transformer-impl?");
  EXPECT_EQ(refusal({"--confg", "x"}), "unknown flag --confg; did you mean --config?");
  EXPECT_EQ(refusal({"--xyzzy-plugh"}), "unknown flag --xyzzy-plugh");
  EXPECT_EQ(refusal({"-num-layers", "3"}), "unknown flag -num-layers; did you mean --num-layers?");
  EXPECT_EQ(refusal({"-x", "3", "--lr", "1"}), "unknown flag -x; flags start with --");
}

TEST(ParseFlags, FlagsOfOtherProgramsAreAnsweredWithOurs) {
  EXPECT_EQ(refusal({"--optimizer.lr", "1"}), "unknown flag --optimizer.lr; did you mean --lr?");
  EXPECT_EQ(refusal({"--num_hidden_layers", "4"}),
            "unknown flag --num_hidden_layers; did you mean --num-layers?");
  EXPECT_EQ(refusal({"--output_dir", "x"}), "unknown flag --output_dir; did you mean --save?");
  EXPECT_EQ(refusal({"--checkpoint.folder=x"}),
            "unknown flag --checkpoint.folder; did you mean --save?");
  EXPECT_EQ(refusal({"--optimizer.lr", "1", "-num-layers", "3"}),
            "unknown flag --optimizer.lr; did you mean --lr?\nunknown flag -num-layers; did you "
            "mean --num-layers?");
  EXPECT_EQ(refusal({"-m", "x"}), "unknown flag -m; flags start with --")
      << "this command has no --load";
}

TEST(ParseFlags, TheLastOfARepeatedFlagCountsWithANote) {
  SampleConfig c;
  EXPECT_THAT(parse(c, {"--lr", "1", "--bf16", "--lr", "2"}).notes,
              ElementsAre("--lr is given more than once; the last one counts: --lr 2"));
  EXPECT_EQ(c.lr, 2);
  EXPECT_THAT(
      parse(c, {"--lr", "1", "--learning-rate", "3"}).notes,
      ElementsAre(
          "--lr and --learning-rate set the same value; the last one counts: --learning-rate 3"));
  EXPECT_EQ(c.lr, 3);
  EXPECT_EQ(parse(c, {"--bf16", "--no-bf16"}).notes.size(), 1u);
  EXPECT_FALSE(c.bf16);
  parse(c, {"--sizes", "1", "2", "--sizes", "3"});
  EXPECT_THAT(c.sizes, ElementsAre(3));
  const ParseResult known =
      parse(c, {"--transformer-impl", "local", "--transformer-impl", "other"});
  EXPECT_THAT(known.already_so,
              ElementsAre(Pair("--transformer-impl other", "there is one implementation")));
  EXPECT_EQ(
      refusal({"--num-experts", "0", "--num-experts", "8"}),
      "--num-experts is refused: mixture of experts is not built\nhint: accepted values: 0, none");
  EXPECT_EQ(refusal({"--num-experts", "8", "--num-experts", "0"}), "accepted");
}

TEST(ParseFlags, KnownFlagsAreAcceptedOrRefusedWithTheReason) {
  SampleConfig c;
  EXPECT_THAT(parse(c, {"--transformer-impl", "local", "--use-flash-attn", "--num-experts", "0",
                        "--mtp-hsm", "false", "--cp-comm-type", "p2p", "p2p"})
                  .already_so,
              ElementsAre(Pair("--transformer-impl local", "there is one implementation"),
                          Pair("--use-flash-attn", "chosen by shape"),
                          Pair("--num-experts 0", "mixture of experts is not built"),
                          Pair("--mtp-hsm false", "multi-token prediction is not built"),
                          Pair("--cp-comm-type p2p p2p", "context parallelism is not built")));
  EXPECT_TRUE(parse(c, {"--use-flash-attn", "false"}).already_so.empty()) << "asks for nothing";
  EXPECT_EQ(refusal({"--mtp-other"}),
            "--mtp-other is refused: multi-token prediction is not built");
  EXPECT_EQ(refusal({"--transformer-impl"}), "--transformer-impl expects a value");
  EXPECT_EQ(refusal({"--use-flash-attn=3"}), "--use-flash-attn takes no value");
  EXPECT_THAT(refusal({"--cp-comm-type", "p2p", "a2a"}), HasSubstr("--cp-comm-type is refused"));
  EXPECT_EQ(
      refusal({"--async-strategy", "cpython"}),
      "--async-strategy \"cpython\" is not one of its values\nhint: legal values: nvrx, mcore");
}

TEST(ParseFlags, KnownFlagsAreJudgedByTheOtherValues) {
  SampleConfig c;
  ParseOptions options;
  options.finalize = [&c] { c.num_layers *= 2; };
  options.judge = [&c](const KnownFlag& flag) {
    if (flag.flag != "--use-flash-attn") return FlagVerdict{true, "as always"};
    return FlagVerdict{c.num_layers > 4, cat_number("layers: ", c.num_layers)};
  };
  EXPECT_THAT(parse(c, {"--use-flash-attn", "--num-layers", "3", "--mtp-hsm"}, options).already_so,
              ElementsAre(Pair("--use-flash-attn", "layers: 6"), Pair("--mtp-hsm", "as always")));
  c = {};
  EXPECT_EQ(refusal_of(c, {"--use-flash-attn", "--num-layers", "2"}, options),
            "--use-flash-attn is refused: layers: 4");
}

TEST(ParseFlags, ValidatesConfigsAndAcrossThem) {
  ParseOptions options;
  options.validate = [](Violations& v) { v.add("--lr does not suit --num-layers"); };
  EXPECT_EQ(refusal({"--num-layers", "0", "--nonsense-flag"}, options),
            "unknown flag --nonsense-flag\n--num-layers 0 is below 1\nhint: 1 or more\n--lr does "
            "not suit --num-layers");
}

TEST(ParseFlags, DoesNotComplainTwiceAboutAValueThatCouldNotBeRead) {
  ParseOptions options;
  options.validate = [](Violations& v) {
    v.add("--num-layers is not divisible by 3");
    v.add("--num-layers-at-start is fine to mention");
  };
  EXPECT_EQ(refusal({"--num-layers", "x"}, options),
            "--num-layers \"x\" is not an integer\n--num-layers-at-start is fine to mention");
}

TEST(ParseFlags, FinalizeRunsBeforeValidation) {
  SampleConfig c;
  ParseOptions options;
  options.finalize = [&c] { c.num_layers = 0; };
  EXPECT_THROW(parse(c, {}, options), UsageError);
  options.finalize = [] { throw Error("--save needs a folder"); };
  EXPECT_EQ(refusal({}, options), "--save needs a folder");
  EXPECT_EQ(refusal({"--lr", "x"}, options), "--lr \"x\" is not a finite number");
}

TEST(ParseFlags, HelpWinsOverEverything) {
  SampleConfig c;
  EXPECT_TRUE(parse(c, {"--nonsense", "--help"}).help);
  EXPECT_TRUE(parse(c, {"-h"}).help);
  EXPECT_EQ(parse(c, {"--lr", "1", "--help", "network", "size"}).help_topic, "network size");
}

TEST(Print, HelpIsShortUnlessMoreIsAskedFor) {
  SampleConfig c;
  Config* const configs[] = {&c};
  constexpr std::string_view basics[] = {"num_layers", "lr"};
  const auto help = [&](std::string_view topic) {
    return help_text("Usage: x", configs, topic, basics);
  };
  const std::string brief = help("");
  EXPECT_THAT(brief, HasSubstr("Usage: x\n\nnetwork size:\n  --num-layers N"));
  EXPECT_THAT(brief, HasSubstr("\ntraining:\n  --lr, --learning-rate X"));
  EXPECT_THAT(brief, Not(HasSubstr("--bf16")));
  EXPECT_THAT(brief, HasSubstr("network size (4), training (7)"));
  EXPECT_EQ(help("all"), help_text("Usage: x", configs));
  EXPECT_THAT(help("Network-Size"), HasSubstr("--num-query-groups"));
  EXPECT_THAT(help("network size"), Not(HasSubstr("--lr")));
  EXPECT_THAT(help("--num-"), HasSubstr("--num-layers"));
  EXPECT_THAT(help("num"), Not(HasSubstr("--shape")));
  EXPECT_THAT(help("xyz"),
              HasSubstr("no group and no flag is called \"xyz\"\n\nmore: --help GROUP"));
}

TEST(ParseFlags, ArgumentsWithoutAFlag) {
  SampleConfig c;
  ParseOptions options;
  options.positional = "save";
  EXPECT_TRUE(parse(c, {"--bf16", "run", "--lr", "1"}, options).was_given("save"));
  EXPECT_EQ(c.save, "run");
  EXPECT_EQ(refusal({"run", "other"}, options),
            "unexpected argument \"other\"; flags start with --");
  options.positional = "data_path";
  parse(c, {"a", "--bf16", "b"}, options);
  EXPECT_THAT(c.data_path, ElementsAre("a", "b"));
}

TEST(ConfigFile, IsOverriddenByFlags) {
  const ScratchFile file(
      "num_layers: 7\nlr: 0.125\n# a comment\ndata-path: [x, 'y z']\nsizes: 4,5\nsave: ~\n"
      "num_query_groups: null\nbf16: True\ndisable_bias_linear: true\nbetas: []\n"
      "use_flash_attn: true\nnum_experts: null\n");
  SampleConfig c;
  c.num_query_groups = 2;
  const ParseResult result = parse(c, {"--lr", "1", "--config", file.path().c_str()});
  EXPECT_EQ(c.num_layers, 7);
  EXPECT_EQ(c.lr, 1);
  EXPECT_TRUE(c.bf16);
  EXPECT_FALSE(c.add_bias_linear);
  EXPECT_EQ(c.num_query_groups, std::nullopt);
  EXPECT_THAT(c.data_path, ElementsAre("x", "y z"));
  EXPECT_THAT(c.sizes, ElementsAre(4, 5));
  EXPECT_TRUE(c.betas.empty());
  EXPECT_EQ(result.already_so.size(), 2u);
  EXPECT_TRUE(result.was_given("num_layers"));
  EXPECT_EQ(
      refusal({"--config", file.path().c_str(), "--num-experts", "8"}),
      "--num-experts is refused: mixture of experts is not built\nhint: accepted values: 0, none")
      << "the command line wins over the file here, too";
}

TEST(ConfigFile, ViolationsNameFileAndLine) {
  const ScratchFile file(
      "num_layers: x\nnum_layrs: 3\nlr: [1, 2]\nsave: {a: b}\nlr: 2\nnum_experts: 8\nshape:\n"
      "- round\n");
  const std::string p = file.path();
  EXPECT_EQ(refusal({"--config", p.c_str(), "--num-layers", "1"}),
            p + ":1: num_layers \"x\" is not an integer\n" + p +
                ":2: unknown name num_layrs; did you mean num_layers?\n" + p +
                ":3: lr holds a list; expected a number\n" + p +
                ":4: save holds a map or a nested list; expected a value or a list of values\n" +
                p + ":5: lr is given twice\n" + p +
                ":7: shape holds a list; expected one of its values\n" + p +
                ":6: num_experts is refused: mixture of experts is not built\nhint: accepted "
                "values: 0, none");
}

TEST(ConfigFile, ThatCannotBeReadIsAViolation) {
  EXPECT_EQ(refusal({"--config", "/nonexistent/run.yaml", "--lr", "x"}),
            "--lr \"x\" is not a finite number\n"
            "cannot open /nonexistent/run.yaml: No such file or directory");
  EXPECT_EQ(refusal({"--config", "/nonexistent/run.yaml", "--num-layers", "0", "--mtp-hsm"}),
            "cannot open /nonexistent/run.yaml: No such file or directory")
      << "what follows from it would hide it";
  EXPECT_EQ(refusal({"--config"}), "--config expects the name of a YAML file");
  const ScratchFile list("- a\n- b\n");
  EXPECT_EQ(refusal({"--config", list.path().c_str()}),
            list.path() + ": expected lines of \"name: value\" at the top level");
  const ScratchFile broken("lr: 1\nsave: [abc\n");
  EXPECT_THAT(refusal({"--config", broken.path().c_str()}), HasSubstr(": not YAML: "));
  const ScratchFile empty("");
  SampleConfig c;
  EXPECT_TRUE(parse(c, {"--config", empty.path().c_str()}).given.empty());
  ParseOptions no_file;
  no_file.allow_config_file = false;
  EXPECT_THAT(refusal({"--config", "x"}, no_file), HasSubstr("unknown flag --config"));
}

// Writes the config as YAML and as JSON and reads both back.
void expect_round_trip(SampleConfig& config) {
  Config* const from[] = {&config};
  for (const std::string& text : {to_yaml(from), to_json(from)}) {
    const ScratchFile file(text);
    SampleConfig copy;
    copy.num_query_groups = 77;
    copy.data_path = {"left over"};
    Config* const to[] = {&copy};
    read_yaml(to, file.path());
    EXPECT_TRUE(copy == config) << text;
    SampleConfig parsed;
    parse(parsed, {"--config", file.path().c_str()});
    EXPECT_TRUE(parsed == config) << text;
  }
}

TEST(ResolvedConfig, ReadsBackEqual) {
  SampleConfig c;
  expect_round_trip(c);
  c = {};
  c.num_layers = std::numeric_limits<int64_t>::max();
  c.lr = 0.1 + 0.2;
  c.bf16 = true;
  c.add_bias_linear = false;
  c.shape = Shape::kWavy;
  c.num_query_groups = -3;
  c.init_std = std::numeric_limits<double>::denorm_min();
  c.sizes = {0, -1, std::numeric_limits<int64_t>::max()};
  c.betas = {1e300, -0.0, 1.0 / 3};
  for (const char* text : {"",
                           "null",
                           "true",
                           "No",
                           "~",
                           "1.5",
                           "0x10",
                           "1:30",
                           "- a",
                           "a: b",
                           "# no comment",
                           "a #b",
                           " leading",
                           "trailing ",
                           "two\nlines",
                           "tab\t",
                           "quote\"s",
                           "it's",
                           "back\\slash",
                           "{a}",
                           "[b]",
                           "&x",
                           "*x",
                           "!t",
                           "%d",
                           "@at",
                           "`tick`",
                           "|",
                           ">",
                           "?",
                           ",",
                           "caf\xc3\xa9",
                           "\xe2\x80\xa8line",
                           "\xc2\x85",
                           "\xef\xbb\xbf"
                           "bom",
                           "\x01\x7f",
                           "/a/b-c_d.e",
                           "\xf0\x9f\x98\x80",
                           "<<",
                           "=",
                           "2026-01-01",
                           "---",
                           "..."}) {
    c.save = text;
    c.data_path = {text, "x", text};
    expect_round_trip(c);
  }
}

TEST(ResolvedConfig, RandomTextReadsBackEqual) {
  std::mt19937 random(7);
  SampleConfig c;
  for (int i = 0; i < 300; ++i) {
    c.save.clear();
    for (unsigned n = random() % 12; n > 0; --n) c.save += static_cast<char>(1 + random() % 127);
    c.data_path.assign(1 + random() % 2, c.save + "'");
    expect_round_trip(c);
  }
}

TEST(ReadYaml, RefusesOrIgnoresUnknownNames) {
  const ScratchFile file("num_layers: 4\nother: {a: 1}\n");
  SampleConfig c;
  Config* const configs[] = {&c};
  EXPECT_THROW(read_yaml(configs, file.path()), UsageError);
  EXPECT_EQ(c.num_layers, 2) << "nothing is set when something is refused";
  read_yaml(configs, file.path(), true);
  EXPECT_EQ(c.num_layers, 4);
}

TEST(Print, YamlJsonAndHelpShowEveryField) {
  SampleConfig c;
  c.save = "no";
  Config* const configs[] = {&c};
  EXPECT_EQ(to_yaml(configs),
            "# network size\nnum_layers: 2\nshape: round\nnum_query_groups: null\nadd_bias_linear: "
            "true\n\n"
            "# training\nlr: 0.5\nbf16: false\ninit_std: null\nsave: \"no\"\nsizes: []\nbetas: "
            "[0.9, 0.95]\ndata_path: []\n");
  EXPECT_THAT(
      to_json(configs),
      HasSubstr("{\n  \"num_layers\": 2,\n  \"shape\": \"round\",\n  \"num_query_groups\": null,"));
  const std::string help = help_text("Usage: megatron x [flags]", configs);
  EXPECT_THAT(help, HasSubstr("Usage: megatron x [flags]\n\nnetwork size:\n  --num-layers N        "
                              "          layers of the "
                              "network (default 2)\n"));
  EXPECT_THAT(help, HasSubstr("--lr, --learning-rate X"));
  EXPECT_THAT(help, HasSubstr("{round,square,wavy-line}"));
}

TEST(ParseFlags, AFieldTakesPrecedenceOverAKnownFlag) {
  SampleConfig c;
  Config* const configs[] = {&c};
  constexpr KnownFlag known[] = {{"--lr", KnownFlag::Kind::kRefused, "not here", 1, 1}};
  std::vector<const char*> arguments = {"x", "--lr", "3"};
  ParseOptions options;
  options.known = known;
  parse_flags(configs, 3, arguments.data(), options);
  EXPECT_EQ(c.lr, 3);
}

struct Clash : Config {
  double lr = 0;
  void fields(FieldVisitor& v) override { v.field({"rate", "--lr"}, lr, ""); }
};

TEST(Fields, TwoOwnersOfOneFlagAreABug) {
  SampleConfig c;
  Clash clash;
  Config* const configs[] = {&c, &clash};
  EXPECT_THROW(describe_fields(configs), InternalError);
}

// As a struct that is put together of topics lists its fields.
struct TopicsConfig : Config {
  int64_t a = 1, b = 2, c = 3, d = 4, e = 5;
  std::string anchor = "a";
  void fields(FieldVisitor& v) override {
    v.field("e", e, "");
    v.role(FieldRole::kArchitecture);
    v.group("first");
    v.field("a", a, "");
    v.group("second");
    v.field("b", b, "");
    v.role(FieldRole::kMachine);
    v.group("first");
    v.field("c", c, "");
    v.list_after(anchor);
    v.field("d", d, "");
  }
};

TEST(Fields, TopicsContinueGroupsAndListFieldsBehindOthers) {
  TopicsConfig topics;
  SampleConfig sample;
  Config* const configs[] = {&topics, &sample};
  const std::vector<FieldInfo> fields = describe_fields(configs);
  std::string list;
  for (const FieldInfo& field : std::span(fields).first(5)) list += field.name + field.group + " ";
  EXPECT_EQ(list, "e afirst dfirst cfirst bsecond ");
  EXPECT_EQ(fields[0].role, FieldRole::kRun);
  EXPECT_EQ(fields[1].role, FieldRole::kArchitecture);
  EXPECT_EQ(fields[2].role, FieldRole::kMachine);
  EXPECT_EQ(fields[4].role, FieldRole::kArchitecture);
  EXPECT_EQ(fields[5].role, FieldRole::kRun) << "another struct";
  EXPECT_EQ(fields[5].group, "network size");
  topics.anchor = "later";
  EXPECT_THROW(describe_fields(configs), InternalError);
}

TEST(Nearest, FindsCloseNamesOnly) {
  const std::vector<std::string> names = {"pretrain", "preprocess-data", "report", "bench"};
  EXPECT_EQ(nearest("pretain", names), "pretrain");
  EXPECT_EQ(nearest("preprocess", names), "");
  EXPECT_EQ(nearest("ropert", names), "report");
  EXPECT_EQ(nearest("x", names), "");
  EXPECT_EQ(nearest("", names), "");
  EXPECT_EQ(nearest("ebnch", names), "bench");
}

}  // namespace
}  // namespace megatron
