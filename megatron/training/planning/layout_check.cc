#include "megatron/training/planning/layout_check.h"

#include <algorithm>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/base/format.h"
#include "megatron/base/json_writer.h"
#include "megatron/pipeline_parallel/draw.h"
#include "megatron/training/planning/letter_costs.h"
#include "megatron/training/planning/module_costs.h"

namespace megatron {

namespace {

constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
constexpr int kShownStages = 16;  // rows in the table of stages; further ones are summarised

// -- text

std::string gib(int64_t bytes) { return format_text("%.3f", static_cast<double>(bytes) / kGiB); }
std::string gb(double bytes) { return format_text("%.3f", bytes / 1e9); }

// "174.6 B" of parameters.
std::string parameters_text(int64_t count) {
  const double n = static_cast<double>(count);
  if (n >= 1e12) return format_text("%.3f T", n / 1e12);
  if (n >= 1e9) return format_text("%.3f B", n / 1e9);
  if (n >= 1e6) return format_text("%.3f M", n / 1e6);
  return format_count(static_cast<uint64_t>(count));
}

// A text table: the first column aligned left, the others right.
class Table {
 public:
  explicit Table(std::vector<std::string> head) { add(std::move(head)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  std::string text() const {
    std::string out;
    for (const std::string& line : format_table(rows_, [](size_t column) { return column > 0; }))
      out += "  " + line + "\n";
    return out;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string layers_text(const LayoutPlan& plan, int stage) {
  std::string text;
  for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
    const StageSlice slice = plan.stages.slice(stage, chunk);
    std::string part;
    const auto append = [&](const std::string& more) { part += part.empty() ? more : "+" + more; };
    if (slice.num_parts > 0) append("V");
    if (slice.num_parts > 0 && slice.all_parts > 1)
      part += slice.num_parts == 1
                  ? cat(slice.first_part + 1)
                  : cat(slice.first_part + 1, "-", slice.first_part + slice.num_parts);
    if (slice.embedding) append("E");
    if (slice.num_layers == 1) append(cat(slice.first_layer + 1));
    if (slice.num_layers > 1)
      append(cat(slice.first_layer + 1, "-", slice.first_layer + slice.num_layers));
    if (slice.head) append("L");
    text += (chunk == 0 ? "" : ", ") + (part.empty() ? "-" : part);
  }
  return text;
}

// The letters of a hybrid model's layers, with | between the segments; empty: it is none.
std::string pattern_of(const LayoutPlan& plan) {
  if (!plan.model().is_hybrid()) return {};
  return pattern_of_segments(plan.model().hybrid_letters(), plan.stages.layer_counts());
}

std::string heading(const LayoutPlan& plan, const LayoutReport& report) {
  const Arguments& a = plan.arguments;
  std::string out = cat(a.world_size, " ranks = ");
  if (plan.encoders != nullptr)
    out += cat("encoders tp ", plan.encoders->tensor, " x dp ", plan.encoders->data,
               " + language model ");
  out +=
      cat("tp ", plan.tensor, " x cp ", plan.context, " x pp ", plan.pipeline, " x dp ", plan.data);
  if (plan.sequence_parallel) out += ", sequence parallel";
  out += cat("\n", parameters_text(report.parameters), " parameters, ", report.layers, " layers; ",
             plan.bytes.model == 2 ? (a.optimizer.bf16 ? "bf16" : "fp16") : "fp32", "; ",
             plan.num_microbatches, " micro-batches of ", a.training.micro_batch_size, " x ",
             plan.model().seq_length, " tokens per step and data rank\n");
  if (const std::string pattern = pattern_of(plan); !pattern.empty())
    out += cat("--hybrid-layer-pattern \"", pattern, "\" divides the layers so\n");
  out += cat("the stages hold ", report.stage_layers, " of ", report.layers, " layers and ",
             format_count(static_cast<uint64_t>(report.stage_parameters)), " of ",
             format_count(static_cast<uint64_t>(report.parameters)), " parameters\n");
  return out;
}

std::vector<std::pair<std::string, int64_t>> memory_items(const StageMemory& m) {
  return {{"weights", m.weights},
          {"gathered weights", m.gathered_weights},
          {"gradients", m.gradients},
          {"filling gradients", m.filling_gradients},
          {"optimizer states", m.optimizer_states},
          {"mailbox of tensor ranks", m.mailbox},
          {"rows that reach experts", m.expert_rows},
          {"activations", m.activations},
          {"weight gradients' inputs", m.weight_gradients},
          {"transfers between stages", m.transfers},
          {"batches", m.batches},
          {"features ahead", m.features_ahead},
          {"temporaries", m.temporaries},
          {"library workspaces", m.library_workspace}};
}

// One layer of each letter; empty: the model is no hybrid.
std::string letters_text(const LayoutPlan& plan) {
  const std::vector<LetterCosts> letters = letter_costs(plan);
  if (letters.empty()) return {};
  constexpr double kMiB = 1 << 20;
  Table table({"layer", "layers", "parameters of one", "saved MiB", "sent MiB", "forward ms",
               "backward ms"});
  for (const LetterCosts& one : letters)
    table.add({cat(one.letter, " ", one.name), cat(one.layers),
               format_count(static_cast<uint64_t>(one.parameters)),
               format_text("%.1f", static_cast<double>(one.saved) / kMiB),
               format_text("%.1f", one.sent / kMiB), format_text("%.3f", one.forward_ms),
               format_text("%.3f", one.backward_ms)});
  return cat("\n", table.text(),
             "  of one layer, for a micro-batch on a rank; times at the rates of an H100\n");
}

// Rows of modules besides the language model; empty: there are none.
std::string modules_text(const LayoutPlan& plan) {
  const std::vector<ModuleReport> modules = module_reports(plan);
  if (modules.empty()) return {};
  Table table({"module", "parameters", "trained", "forward TFLOP", "backward TFLOP", "forward ms",
               "backward ms"});
  const auto tera = [](double flops) { return format_text("%.4f", flops / 1e12); };
  for (const ModuleReport& one : modules)
    table.add({one.name, format_count(static_cast<uint64_t>(one.parameters)),
               format_count(static_cast<uint64_t>(one.trained)), tera(one.forward_flops),
               tera(one.backward_flops), format_text("%.3f", one.forward_ms),
               format_text("%.3f", one.backward_ms)});
  return cat("\n", table.text(),
             "  of the largest legal micro-batch, for a rank; times at the rates of an H100\n");
}

std::string memory_text(const LayoutPlan& plan, const LayoutReport& report, const StageMemory& m,
                        const std::string& where) {
  Table table({cat("memory of a rank of ", where, ", GiB"), ""});
  for (const auto& [name, bytes] : memory_items(m)) {
    if (bytes == 0) continue;
    table.add({name, gib(bytes)});
    for (const ModuleMemory& module : m.modules) {
      const int64_t of = name == "weights"            ? module.weights
                         : name == "gradients"        ? module.gradients
                         : name == "optimizer states" ? module.states
                                                      : 0;
      if (of > 0) table.add({cat("  ", module_name(module.name), " ", gib(of))});
    }
    if (name != "activations") continue;
    for (size_t chunk = 0; chunk < m.passes.size(); ++chunk) {
      const SavedBytes& saved = m.passes[chunk].saved;
      const std::string of = m.passes.size() > 1 ? cat("of chunk ", chunk) : "";
      table.add({cat("  ", m.passes_in_flight[chunk], " micro-batches in flight ", of,
                     of.empty() ? "" : " ", "x ", gib(saved.total()))});
      for (const auto& [part, size] :
           {std::pair<const char*, int64_t>{"residual stream", saved.residual},
            {"norms", saved.norms},
            {"attention", saved.attention},
            {"mlp", saved.mlp},
            {"embedding, head, loss", saved.ends},
            {"encoder of media", saved.encoder},
            {"features of media", saved.features}})
        if (size > 0) table.add({cat("    ", part, " ", gib(size))});
    }
  }
  table.add({"allocated at the peak", gib(m.allocated())});
  if (m.host_optimizer_states > 0)
    table.add({"in host memory: optimizer states", gib(m.host_optimizer_states)});
  if (m.host_activations > 0) table.add({"in host memory: activations", gib(m.host_activations)});
  if (plan.on_gpu) {
    table.add({"CUDA context, about", gib(report.outside.context)});
    table.add({"NCCL buffers, about", gib(report.outside.communicators)});
    table.add({"on the GPU, about",
               gib(m.allocated() + report.outside.context + report.outside.communicators)});
  }
  return table.text();
}

// Of the fullest stage, and of the encoders' own ranks.
std::string memories_text(const LayoutPlan& plan, const LayoutReport& report) {
  const int fullest = report.fullest;
  std::string out = memory_text(plan, report, report.stages[static_cast<size_t>(fullest)].memory,
                                cat("stage ", fullest));
  if (report.encoders)
    out += "\n" + memory_text(*plan.encoders, report, report.encoders->memory, "the encoders");
  return out;
}

std::string stages_text(const LayoutPlan& plan, const LayoutReport& report) {
  Table table({"stage", "layers", "parameters of a rank", "constant GiB", "in flight", "peak GiB",
               "waits"});
  const auto add = [&](const std::string& name, const std::string& layers, const StageReport& stage,
                       const std::string& idle) {
    std::string flight;
    for (const int count : stage.memory.passes_in_flight)
      flight += cat(flight.empty() ? "" : "+", count);
    table.add({name, layers, format_count(static_cast<uint64_t>(stage.memory.parameters)),
               gib(stage.memory.before_training()), flight, gib(stage.memory.allocated()), idle});
  };
  if (report.encoders) add("encoders", "V", *report.encoders, "");
  const int stages = static_cast<int>(report.stages.size());
  for (int i = 0; i < stages; ++i) {
    const bool shown = stages <= kShownStages || i < kShownStages / 2 ||
                       i >= stages - kShownStages / 2 || i == report.fullest;
    if (!shown) {
      if (i == kShownStages / 2) table.add({"..."});
      continue;
    }
    const StageReport& stage = report.stages[static_cast<size_t>(i)];
    add(cat(i), layers_text(plan, i), stage, format_text("%.1f%%", 100 * stage.idle));
  }
  return table.text();
}

// For each group, the stage that sends most over it.
std::string traffic_text(const LayoutReport& report) {
  struct Most {
    GroupTraffic traffic;
    std::string stage;
  };
  std::vector<Most> most;
  if (report.encoders)
    for (GroupTraffic traffic : report.encoders->traffic) {
      traffic.group = "encoders " + traffic.group;
      most.push_back({traffic, "encoders"});
    }
  for (size_t i = 0; i < report.stages.size(); ++i) {
    for (const GroupTraffic& traffic : report.stages[i].traffic) {
      const auto found = std::find_if(most.begin(), most.end(), [&](const Most& m) {
        return m.traffic.group == traffic.group;
      });
      if (found == most.end())
        most.push_back({traffic, cat(i)});
      else if (found->traffic.total() < traffic.total())
        *found = {traffic, cat(i)};
    }
  }
  if (most.empty()) return "  one rank: nothing is sent\n";
  Table table(
      {"sent by a rank in a step, GB", "ranks", "forward", "backward", "once", "all", "of stage"});
  for (const Most& m : most)
    table.add({m.traffic.group, cat(m.traffic.ranks), gb(m.traffic.forward), gb(m.traffic.backward),
               gb(m.traffic.once), gb(m.traffic.total()), m.stage});
  return table.text();
}

// By load: balance, what the plan is for, the bound on rows, and the worst.
std::vector<std::pair<double, std::string>> expert_loads(const LayoutPlan& plan) {
  if (!plan.model().has_moe() || plan.expert == 1) return {};
  const double worst = worst_expert_load(plan.model(), plan.expert);
  std::vector<std::pair<double, std::string>> loads = {{1.0, "balance"}};
  if (plan.expert_load != 1.0) loads.emplace_back(plan.expert_load, "--load-factor");
  if (const std::optional<double> bound = plan.model().moe_expert_rank_capacity_factor;
      bound && *bound < worst)
    loads.emplace_back(*bound, "--moe-expert-rank-capacity-factor");
  loads.emplace_back(worst, "worst case");
  std::ranges::stable_sort(loads, {}, &std::pair<double, std::string>::first);
  return loads;
}

ExpertLoadReport at_load(LayoutPlan plan, double load, const std::string& name) {
  plan.set_expert_load(load);
  ExpertLoadReport report{name, load, rank_expert_rows(plan.model(), plan.layer_shape())};
  for (int stage = 0; stage < static_cast<int>(plan.pipeline); ++stage) {
    const int64_t allocated = stage_memory(plan, stage).allocated();
    if (allocated > report.allocated) report.fullest = stage;
    report.allocated = std::max(report.allocated, allocated);
    for (const GroupTraffic& traffic : stage_traffic(plan, stage)) {
      if (traffic.group == "ep")
        report.expert_bytes = std::max(report.expert_bytes, traffic.total());
      if (traffic.group == "etp")
        report.expert_tensor_bytes = std::max(report.expert_tensor_bytes, traffic.total());
    }
  }
  return report;
}

std::string expert_loads_text(const LayoutReport& report) {
  if (report.expert_loads.empty()) return "";
  Table table({"load of a rank's experts", "", "rows of a layer", "at a time", "peak GiB",
               "of stage", "ep GB", "etp GB"});
  for (const ExpertLoadReport& one : report.expert_loads)
    table.add({one.name, format_text("%.3g", one.load),
               format_count(static_cast<uint64_t>(one.rows.all)),
               format_count(static_cast<uint64_t>(one.rows.held)), gib(one.allocated),
               cat(one.fullest), gb(one.expert_bytes), gb(one.expert_tensor_bytes)});
  return "\n" + table.text();
}

// A schedule with few enough micro-batches to be readable.
Schedule shown_schedule(const LayoutPlan& plan) {
  const int64_t unit = std::max<int64_t>(
      plan.arguments.pipeline.microbatch_group_size_per_vp_stage.value_or(plan.pipeline), 1);
  const int64_t wanted = std::max<int64_t>(8, 2 * plan.pipeline);
  const int64_t shown = (wanted + unit - 1) / unit * unit;
  if (shown >= plan.num_microbatches) return plan.schedule;
  return make_schedule(plan.arguments.pipeline.pipeline_schedule,
                       plan.arguments.pipeline.shape(plan.stages, shown));
}

void add_json(JsonWriter& json, const StageMemory& m) {
  json.begin_object();
  for (const auto& [name, bytes] : memory_items(m)) json.member(name, bytes);
  json.member("allocated", m.allocated())
      .member("host_optimizer_states", m.host_optimizer_states)
      .member("host_activations", m.host_activations)
      .member("in_flight", m.passes_in_flight);
  json.key("modules").begin_object();
  for (const ModuleMemory& module : m.modules)
    json.key(module_name(module.name))
        .begin_object()
        .member("weights", module.weights)
        .member("gradients", module.gradients)
        .member("optimizer states", module.states)
        .end_object();
  json.end_object().key("saved_per_pass").begin_array();
  for (const PassBytes& pass : m.passes) {
    const SavedBytes& saved = pass.saved;
    json.begin_object()
        .member("residual", saved.residual)
        .member("norms", saved.norms)
        .member("attention", saved.attention);
    json.member("mlp", saved.mlp)
        .member("ends", saved.ends)
        .member("encoder", saved.encoder)
        .member("features", saved.features)
        .member("all", saved.total())
        .end_object();
  }
  json.end_array().end_object();
}

void add_members(JsonWriter& json, const StageReport& stage) {
  json.member("logical_parameters", stage.logical_parameters)
      .member("parameters_of_a_rank", stage.memory.parameters);
  json.member("idle", stage.idle).key("memory_bytes");
  add_json(json, stage.memory);
  json.key("sent_bytes").begin_object();
  for (const GroupTraffic& traffic : stage.traffic) {
    json.key(traffic.group)
        .begin_object()
        .member("ranks", traffic.ranks)
        .member("forward", traffic.forward);
    json.member("backward", traffic.backward).member("once", traffic.once).end_object();
  }
  json.end_object();
}

void add_json(JsonWriter& json, const std::vector<ExpertLoadReport>& loads) {
  json.begin_array();
  for (const ExpertLoadReport& one : loads)
    json.begin_object()
        .member("name", one.name)
        .member("load", one.load)
        .member("rows", one.rows.all)
        .member("rows_at_a_time", one.rows.held)
        .member("rounds", one.rows.rounds)
        .member("allocated", one.allocated)
        .member("fullest_stage", one.fullest)
        .member("ep_sent_bytes", one.expert_bytes)
        .member("etp_sent_bytes", one.expert_tensor_bytes)
        .end_object();
  json.end_array();
}

// `unit`: multiply-adds that take 1; `head`: the time of the output layer.
PassCosts chunk_costs(const LayoutPlan& plan, int stage, int chunk, double unit, double head) {
  const StageSlice slice = plan.stages.slice(stage, chunk);
  const bool full = recomputed_layers(plan.model(), slice.num_layers).layers > 0;
  double weights = 0, scores = 0, first_again = 0, second_again = 0;
  for (int64_t i = 0; i < slice.num_layers; ++i) {
    const LayerCost layer = plan.layer_cost(slice.first_layer + i + 1);
    weights += layer.weight_products();
    scores += layer.score_products();
    first_again += layer.first.recomputed_products;
    second_again += layer.second.recomputed_products;
  }
  double linear = weights / unit + (slice.head && !plan.splits_vocabulary() ? head : 0.0),
         attention = scores / unit;
  const double again =
      (full ? (weights + scores) / unit : 0.0) + first_again / unit + second_again / unit;
  double forward = linear + attention, input = forward + attention + again;
  for (const ModuleCost& module : plan.ends_of(stage, chunk).modules) {
    if (!slice.embedding && slice.num_parts == 0) break;
    const double per_token = static_cast<double>(plan.tensor) / static_cast<double>(plan.tokens());
    const double w = module.weights * per_token / unit, s = module.scores * per_token / unit;
    forward += w + s;
    if (module.grads) input += w + 2 * s + module.again * per_token / unit;
    if (module.weight_grads) linear += w;
  }
  // A minimum, so that the drawing shows segments without work.
  const double least = 0.05;
  return {std::max(forward, least), input + std::max(0.0, least - forward),
          std::max(linear, least)};
}

}  // namespace

double unit_products(const LayoutPlan& plan) { return plan.layer_cost(1).products(); }

ScheduleCosts schedule_costs(const LayoutPlan& plan) {
  if (plan.arguments.pipeline.zero_bubble_pass_times.empty()) return compute_costs(plan);
  return plan.arguments.pipeline
      .shape(plan.pipeline, plan.stages.num_chunks(), plan.num_microbatches)
      .costs;
}

ScheduleCosts compute_costs(const LayoutPlan& plan) {
  const double unit = unit_products(plan);
  const double head = plan.ends.head_products / unit;
  ScheduleCosts costs;
  if (plan.splits_vocabulary()) {
    costs.head = head / static_cast<double>(plan.pipeline);
    costs.loss = 2 * costs.head;
  }
  for (int stage = 0; stage < static_cast<int>(plan.pipeline); ++stage) {
    costs.passes.emplace_back();
    for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk)
      costs.passes.back().push_back(chunk_costs(plan, stage, chunk, unit, head));
  }
  return costs;
}

namespace {

StageReport encoders_report(const LayoutPlan& plan) {
  StageReport report;
  for (const Parameter* p : plan.held_by(0).chunks.front()->parameters())
    report.logical_parameters += stage_elements(plan, 0, *p);
  report.memory = stage_memory(plan, 0);
  report.traffic = stage_traffic(plan, 0);
  return report;
}

// Of a rank that needs most, and the stage that it is on; -1: it is one of the encoders' own.
std::pair<int64_t, int> most_needed(const LayoutReport& report) {
  const int64_t of_stages = report.stages[static_cast<size_t>(report.fullest)].memory.allocated();
  const int64_t of_encoders = report.encoders ? report.encoders->memory.allocated() : 0;
  return of_encoders > of_stages ? std::pair(of_encoders, -1)
                                 : std::pair(of_stages, report.fullest);
}

}  // namespace

LayoutReport make_layout_report(const LayoutPlan& plan, const LayoutQuestions& questions) {
  LayoutReport report;
  report.checkpoint = make_checkpoint_plan(plan);
  if (questions.checkpoint_bandwidth > 0)
    report.checkpoint_seconds = report.checkpoint.seconds(questions.checkpoint_bandwidth,
                                                          questions.checkpoint_bandwidth_of_all);
  // What two modules do beside each other is not estimated.
  if (questions.speeds && plan.encoders == nullptr)
    report.step = estimate_step(plan, *questions.speeds);
  const Replay played = replay(plan.schedule, schedule_costs(plan));
  report.idle = played.bubble_fraction;
  report.layers = plan.model().num_layers;
  report.parameters = plan.model_elements;
  report.outside = outside_memory(plan);
  for (int i = 0; i < static_cast<int>(plan.pipeline); ++i) {
    StageReport stage;
    for (int chunk = 0; chunk < plan.stages.num_chunks(); ++chunk) {
      report.stage_layers += plan.stages.slice(i, chunk).num_layers;
      for (const Parameter* p : plan.held_by(i).chunks[static_cast<size_t>(chunk)]->parameters())
        stage.logical_parameters += stage_elements(plan, i, *p);
    }
    stage.memory = stage_memory(plan, i);
    stage.traffic = stage_traffic(plan, i);
    stage.idle = played.stages[static_cast<size_t>(i)].bubble(played.makespan);
    report.stage_parameters += stage.logical_parameters;
    report.stages.push_back(std::move(stage));
    if (report.stages.back().memory.allocated() >
        report.stages[static_cast<size_t>(report.fullest)].memory.allocated())
      report.fullest = i;
  }
  if (plan.encoders != nullptr) {
    report.encoders = encoders_report(*plan.encoders);
    report.stage_parameters += report.encoders->logical_parameters;
  }
  MEGATRON_ASSERT(
      report.stage_layers == report.layers && report.stage_parameters == report.parameters,
      "the stages hold ", report.stage_layers, " layers and ", report.stage_parameters,
      " parameters of ", report.layers, " and ", report.parameters);
  for (const auto& [load, name] : expert_loads(plan))
    report.expert_loads.push_back(at_load(plan, load, name));
  if (questions.device != nullptr) {
    const auto [allocated, stage] = most_needed(report);
    report.verdict = {questions.device, stage,
                      allocated + report.outside.context + report.outside.communicators};
  }
  return report;
}

namespace {

// For each kind of group: how many there are, and the ranks of the first.
struct Groups {
  std::string name;
  size_t count;
  std::vector<int> first;
};
std::vector<Groups> groups_of(const LayoutPlan& plan) {
  std::vector<Groups> all;
  const int before = plan.encoders != nullptr ? plan.encoders->mesh.world_size() : 0;
  if (plan.encoders != nullptr)
    for (Groups groups : groups_of(*plan.encoders)) {
      groups.name = "encoders " + groups.name;
      all.push_back(std::move(groups));
    }
  for (const AxisSet axes : ParallelGroups::axes()) {
    if (axes.of_experts() && !plan.mesh.no_experts().empty()) continue;
    Groups groups{axes_text(axes), static_cast<size_t>(plan.mesh.num_groups(axes)),
                  plan.mesh.group(0, axes)};
    // A group of experts with the ranks of another group is that group.
    const bool known = axes.of_experts() && std::ranges::any_of(all, [&](const Groups& other) {
                         return other.first == groups.first;
                       });
    for (int& rank : groups.first) rank += before;
    if (groups.first.size() > 1 && !known) all.push_back(std::move(groups));
  }
  return all;
}

std::string groups_text(const LayoutPlan& plan) {
  const std::vector<Groups> all = groups_of(plan);
  if (all.empty()) return "";
  Table table({"groups", "number", "ranks each", "the first"});
  for (const Groups& groups : all) {
    std::string ranks;
    for (size_t i = 0; i < groups.first.size(); ++i) {
      if (groups.first.size() > 4 && i == 2) ranks += " ...";
      if (groups.first.size() <= 4 || i < 2 || i + 1 == groups.first.size())
        ranks += cat(ranks.empty() ? "" : " ", groups.first[i]);
    }
    table.add({groups.name, cat(groups.count), cat(groups.first.size()), ranks});
  }
  return "\n" + table.text();
}

std::string checkpoint_text(const LayoutReport& report) {
  const CheckpointPlan& plan = report.checkpoint;
  const auto writers = static_cast<double>(std::max<int64_t>(1, plan.files));
  std::string out =
      cat("checkpoint: ", gb(static_cast<double>(plan.total)), " GB in ", plan.files,
          plan.files == 1 ? " file" : " files", ", ", gb(static_cast<double>(plan.total) / writers),
          " GB each on average and ", gb(static_cast<double>(plan.most())), " at most, by rank ",
          plan.fullest, "; ", format_count(static_cast<uint64_t>(plan.fragments)),
          " fragments, a manifest of about ", gb(static_cast<double>(plan.manifest_bytes)), " GB");
  if (report.checkpoint_seconds)
    out += cat("; written in ", format_text("%.1f", *report.checkpoint_seconds), " s");
  return out + "\n";
}

std::vector<std::pair<std::string, double>> step_items(const StepEstimate& step) {
  return {{"the model's operations", step.ideal},      {"schedule", step.schedule},
          {"recomputation", step.recompute},           {"tensor parallelism", step.tensor},
          {"context parallelism", step.context},       {"expert parallelism", step.expert},
          {"transfers between stages", step.pipeline}, {"data parallelism", step.data}};
}

std::string step_text(const LayoutPlan& plan, const StepEstimate& step) {
  Table table({"a step, seconds", "", "part"});
  for (const auto& [name, time] : step_items(step))
    if (time > 0)
      table.add(
          {name, format_text("%.3f", time), format_text("%.1f%%", 100 * time / step.total())});
  table.add({"all", format_text("%.3f", step.total()), ""});
  const double tokens =
      static_cast<double>(plan.num_microbatches * plan.data * plan.context * plan.tokens());
  return cat(
      "\n", table.text(), "efficiency ", format_text("%.1f%%", 100 * step.efficiency()),
      " of the attained rate, ",
      format_text("%.0f", tokens / step.total() / static_cast<double>(plan.arguments.world_size)),
      " tokens per second and rank\n");
}

void write_letters(const LayoutPlan& plan, JsonWriter& json) {
  json.key("letters").begin_array();
  for (const LetterCosts& one : letter_costs(plan))
    json.begin_object()
        .member("letter", std::string(1, one.letter))
        .member("layers", one.layers)
        .member("parameters", one.parameters)
        .member("saved", one.saved)
        .member("sent", one.sent)
        .member("forward_ms", one.forward_ms)
        .member("backward_ms", one.backward_ms)
        .end_object();
  json.end_array();
}

void write_modules(const LayoutPlan& plan, JsonWriter& json) {
  json.key("modules").begin_array();
  for (const ModuleReport& one : module_reports(plan))
    json.begin_object()
        .member("name", one.name)
        .member("parameters", one.parameters)
        .member("trained", one.trained)
        .member("forward_flops", one.forward_flops)
        .member("backward_flops", one.backward_flops)
        .member("forward_ms", one.forward_ms)
        .member("backward_ms", one.backward_ms)
        .end_object();
  json.end_array();
}

}  // namespace

std::string layout_text(const LayoutPlan& plan, const LayoutReport& report) {
  std::string out = heading(plan, report);
  if (plan.pipeline > 1)
    out += cat("pipeline: ", plan.schedule.name, ", idle ",
               format_text("%.1f%%", 100 * report.idle), " of the time\n");
  out += checkpoint_text(report);
  out += groups_text(plan) + "\n" + stages_text(plan, report) + letters_text(plan) +
         modules_text(plan) + "\n" + memories_text(plan, report) + "\n" + traffic_text(report) +
         expert_loads_text(report);
  if (plan.encoders != nullptr)
    out +=
        "\nthe time of a step is not estimated: encoders on ranks of their own work beside the "
        "language model\n";
  return report.step ? out + step_text(plan, *report.step) : out;
}

std::string layout_json(const LayoutPlan& plan, const LayoutReport& report) {
  JsonWriter json(2);
  json.begin_object()
      .member("world_size", plan.arguments.world_size)
      .member("tensor", plan.tensor)
      .member("context", plan.context);
  json.member("pipeline", plan.pipeline)
      .member("data", plan.data)
      .member("num_microbatches", plan.num_microbatches);
  json.member("schedule", plan.schedule.name)
      .member("idle", report.idle)
      .member("parameters", report.parameters);
  if (const std::string pattern = pattern_of(plan); !pattern.empty())
    json.member("hybrid_layer_pattern", pattern);
  write_letters(plan, json);
  write_modules(plan, json);
  json.member("layers", report.stage_layers).member("fullest_stage", report.fullest);
  json.member("cuda_context", report.outside.context)
      .member("nccl_buffers", report.outside.communicators);
  const CheckpointPlan& checkpoint = report.checkpoint;
  json.key("checkpoint")
      .begin_object()
      .member("bytes", checkpoint.total)
      .member("files", checkpoint.files);
  json.member("most_bytes_of_a_rank", checkpoint.most()).member("by_rank", checkpoint.fullest);
  json.member("fragments", checkpoint.fragments)
      .member("manifest_bytes", checkpoint.manifest_bytes);
  if (report.checkpoint_seconds) json.member("seconds", *report.checkpoint_seconds);
  json.end_object().key("groups").begin_array();
  for (const Groups& groups : groups_of(plan)) {
    json.begin_object()
        .member("name", groups.name)
        .member("number", groups.count)
        .member("first", groups.first)
        .end_object();
  }
  json.end_array();
  if (report.verdict)
    json.key("device")
        .begin_object()
        .member("name", report.verdict->device->name)
        .member("memory_bytes", report.verdict->device->memory_bytes)
        .member("needed_bytes", report.verdict->needed)
        .member("fits", report.verdict->fits())
        .end_object();
  if (report.step) {
    json.key("step_seconds").begin_object();
    for (const auto& [name, time] : step_items(*report.step)) json.member(name, time);
    json.member("all", report.step->total())
        .member("efficiency", report.step->efficiency())
        .end_object();
  }
  json.key("expert_loads");
  add_json(json, report.expert_loads);
  if (report.encoders) {
    json.key("encoders").begin_object();
    json.member("tensor", plan.encoders->tensor).member("data", plan.encoders->data);
    add_members(json, *report.encoders);
    json.end_object();
  }
  json.key("stages").begin_array();
  for (size_t i = 0; i < report.stages.size(); ++i) {
    json.begin_object().member("stage", i).member("layers", layers_text(plan, static_cast<int>(i)));
    add_members(json, report.stages[i]);
    json.end_object();
  }
  json.end_array().end_object();
  return json.text();
}

std::string schedule_text(const LayoutPlan& plan, int columns) {
  const Schedule shown = shown_schedule(plan);
  return draw_text(shown, replay(shown, schedule_costs(plan)), columns);
}

std::string schedule_svg(const LayoutPlan& plan) {
  const Schedule shown = shown_schedule(plan);
  return draw_svg(shown, replay(shown, schedule_costs(plan)));
}

}  // namespace megatron
