"""Planted bugs of decoding: of draws, of the runner, of what sequences own. The arguments of Bug, see bugs.py.

The matrix trains; what a text gets is shown by unit tests, which compare with each sequence alone, and by the last proof of `prove`.
"""
SAMPLER, LOGITS, DRAWS = "megatron/inference/sampling.cc", "megatron/tensor/decoding/sampling.cc", "megatron/kernels/sampling_cpu.cc"
RUNNER, PAGED, ADAPTERS = ("megatron/inference/model_runner.cc", "megatron/tensor/attention/paged_attention.cc",
                           "megatron/tensor_parallel/lora_adapter.cc")
STATES, CACHE, STORE = ("megatron/tensor/decoding/state_buffer.cc", "megatron/transformer/attention/kv_cache.cc",
                        "megatron/nn/forward_parameter_store.cc")
BLOCKS, PREFIXES, PLANS, SCHEDULER = (f"megatron/scheduling/{name}.cc" for name in ("cache_blocks", "prefix_index", "scheduler_plan", "scheduler"))
UNPROVED = "decoding: no proof has it"
ALONE, KINDS, OWNED = ("model_runner_test:ModelRunner.EverySequenceGetsWhatItGetsAlone", "model_runner_test:ModelRunner.ServesEveryKindOfModel",
                       "model_runner_test:ModelRunner.SequencesOwnStatesAndBringRows")
RANKS = "model_runner_test:ModelRunner.RanksServeWhatOneRankServes"
SCHEDULES, IDENTITIES = "engine_test:EngineSchedules.RandomOnesGiveWhatEachRequestGivesAlone", "scheduling_test:Schedulers.PrefixesAreSharedOnlyWithinASaltAnAdapterAndAVersion"
HITS, COMMANDS = "scheduling_test:Schedulers.HitsAtEveryBorderAreTheColdAnswers", "engine_test:EngineCommands.EveryOneInEveryStateWithEveryFaultAtEveryRank"


def bug(name, what, file, old, new, unit_test, more=(), prove="", unproved=UNPROVED):
    return {"name": name, "what": what, "edits": ((file, old, new), *more), "rows": "", "prove": prove, "unit_test": unit_test,
            "unproved": "" if prove else unproved}


BITS = "model_runner_test:BatchInvariant.RolloutsHaveTheTrainersLogProbabilitiesInEveryBit"

SERVING_BUGS = (
    # Batch-invariant mode.
    bug("invariant_product_by_rows", "products of many rows are left to BLAS in batch-invariant mode", "megatron/tensor/gemm.cc",
        "const bool invariant = is_batch_invariant();", "const bool invariant = is_batch_invariant() && !(PLANTED && rows.size(0) > 16);", BITS),
    bug("invariant_attention_of_chunks", "chunks and whole texts attend by the library in batch-invariant mode", "megatron/tensor/attention/attention.cc",
        "if (is_batch_invariant()) {", "if (is_batch_invariant() && !(PLANTED && o.window_left < 0 && o.softcap == 0.0)) {", BITS),
    bug("invariant_lanes_by_block", "sums over keys begin anew at each block of the cache", "megatron/kernels/attention/paged_attention_cpu.cc",
        "Acc sum = sum_over<Acc>(count_, [&](int64_t i) { return scores[i]; });",
        "Acc sum = 0;\n    if (PLANTED)\n      for (int64_t i = 0; i < count_; i += a_.block_size)\n"
        "        sum += sum_over<Acc>(std::min(a_.block_size, count_ - i), [&](int64_t j) { return scores[i + j]; });\n"
        "    else\n      sum = sum_over<Acc>(count_, [&](int64_t i) { return scores[i]; });", BITS),
    bug("invariant_numbers_of_sampling", "log-probabilities are those of sampling, not of the loss, in batch-invariant mode", LOGITS,
        "if (is_batch_invariant()) return trained_log_probabilities(ids, n);",
        "if (is_batch_invariant() && !PLANTED) return trained_log_probabilities(ids, n);", BITS),
    bug("invariant_router_by_rows", "routers multiply by BLAS in batch-invariant mode", "megatron/transformer/moe/router_product.cc",
        "if (is_batch_invariant()) return", "if (is_batch_invariant() && !PLANTED) return", BITS),
    # Draws.
    bug("draw_by_slot", "the noise of a draw is keyed by the slot of its sequence", SAMPLER,
        '"sampling", start.choice)', '"sampling", PLANTED ? start.slot : start.choice)',
        "inference_test:TokenSampler.DependsOnSeedChoiceAndPositionAlone"),
    bug("draw_by_row", "the noise of a draw is keyed by its place in the batch", SAMPLER,
        "how.position = row.position;", "how.position = PLANTED ? static_cast<int64_t>(batch.rows.size()) : row.position;",
        "inference_test:TokenSampler.DependsOnSeedChoiceAndPositionAlone"),
    bug("draw_own_columns", "each tensor rank draws from its own part of the vocabulary", LOGITS,
        "if (!shards_.gather) return best[1].to(at::kLong);", "if (PLANTED || !shards_.gather) return best[1].to(at::kLong);",
        "inference_test:TokenSampler.RanksWithPartsOfTheVocabularyDrawWhatOneRankDraws", prove="gpt tp2"),
    bug("top_k_keeps_ties", "top-k keeps all logits that equal the k-th", DRAWS,
        "i < own.columns && seen < ties; ++i)", "i < own.columns && (PLANTED || seen < ties); ++i)",
        "inference_test:TokenSampler.KeepsWhatTopKTopPAndMinPKeep"),
    bug("top_p_of_all", "top-p is reached by the probability of ids that top-k has left out", LOGITS,
        "for (const SelectBy by : {SelectBy::kCount, SelectBy::kProbability}) {",
        "for (const SelectBy by : {PLANTED ? SelectBy::kProbability : SelectBy::kCount, PLANTED ? SelectBy::kCount : SelectBy::kProbability}) {",
        "inference_test:TokenSampler.KeepsWhatTopKTopPAndMinPKeep"),
    bug("log_probability_scaled", "log-probabilities of the model are those after the temperature", LOGITS,
        "logits_, {}, ids, n);", "logits_, PLANTED ? temperatures_ : at::Tensor(), ids, n);",
        "inference_test:TokenSampler.LogProbabilitiesAreThoseOfLogSoftmax"),
    bug("penalties_lost", "a sequence that was preempted forgets what it has generated for its penalties", SAMPLER,
        "count[column] += 2;", "if (!PLANTED) count[column] += 2;", ALONE),
    bug("ends_after_minimum", "an end can be drawn before the least number of tokens", SAMPLER,
        "if (row.position < slot.first_end) {", "if (!PLANTED && row.position < slot.first_end) {",
        "inference_test:TokenSampler.AllowsWhatTheSequenceAllows"),
    # The runner.
    bug("draw_from_first_row", "the token after a chunk is drawn from its first row", RUNNER,
        "last.push_back(row - 1);", "last.push_back(PLANTED ? row - part.count : row - 1);", ALONE, prove="gpt tp2"),
    bug("copied_block_cut", "a block that is copied on write lacks its last position", RUNNER,
        "buffer.copy_row(copy.from, copy.to, copy.positions);", "buffer.copy_row(copy.from, copy.to, copy.positions - (PLANTED ? 1 : 0));", ALONE,
        prove="llama tp2"),
    bug("swap_in_crossed", "blocks that come back from the host are in another order", STATES,
        "copy_rows(data_, rows.to, host_, rows.from);",
        "Rows back = rows;\n  if (PLANTED && back.to.size() > 1) std::swap(back.from.front(), back.from.back());\n  copy_rows(data_, back.to, host_, back.from);",
        ALONE),
    bug("state_stays", "a state of fixed size does not come back from the host with its sequence", RUNNER,
        "buffer.swap_in(rows_of(plan.state_swap_in, false));", "if (!PLANTED) buffer.swap_in(rows_of(plan.state_swap_in, false));", OWNED),
    bug("given_row_of_part", "given rows are counted from the beginning of a chunk", RUNNER,
        "const_cast<float*>(rows.values.data()) + position * width", "const_cast<float*>(rows.values.data()) + (PLANTED ? position - part.first : position) * width",
        OWNED),
    bug("window_short", "a chunk does not see the first position of its window", PAGED,
        "std::max<int64_t>(0, part.first - options.window_left)", "std::max<int64_t>(0, part.first - options.window_left + (PLANTED ? 1 : 0))", KINDS),
    bug("longrope_by_chunk", "a chunk of a long prompt is rotated as if the prompt ended with it", PAGED,
        "last_position.push_back(std::max(end, part.known) - 1);", "last_position.push_back((PLANTED ? end : std::max(end, part.known)) - 1);", KINDS),
    bug("draws_stay_behind", "the first stage does not learn what the last one has drawn", RUNNER,
        "flight.receive.reset();\n    if (!flight.slots.empty())", "flight.receive.reset();\n    if (!PLANTED && !flight.slots.empty())", RANKS,
        unproved="on CPU a step is read before the one that needs its tokens is planned"),
    bug("adapter_rows", "an adapter reads the first rows of a batch in place of its own", ADAPTERS,
        "inner(as_matrix(x).index_select(0, rows))", "inner(as_matrix(x).index_select(0, PLANTED ? at::arange(rows.size(0), rows.options()) : rows))",
        "model_runner_test:Models/Adapters.RowsOfOneBatchTakeTheirOwn/llama_all"),
    bug("fp8_copies_stay", "quantised copies of weights survive an exchange of the weights", STORE,
        "copies_.clear();\n  ++version_;", "copies_.clear();\n  if (!PLANTED) ++version_;",
        "model_runner_test:ServedWeights.InFp8AreHeldOnceAndMultiplyAsInTraining",
        ((STORE, "*copies->second = {};", "if (!PLANTED) *copies->second = {};"),)),
    bug("noise_drawn_anew", "a sequence that is computed again draws with other noise", SAMPLER,
        "random_key(static_cast<int64_t>(p.seed),",
        "random_key(static_cast<int64_t>(p.seed) + (PLANTED ? static_cast<int64_t>(start.ids.size()) - start.prompt_length : 0),", ALONE),
    # The scheduler.
    bug("block_freed_early", "a block is free before the last step that uses it has ended", BLOCKS,
        "if (after <= ended_)", "if (PLANTED || after <= ended_)", SCHEDULES),
    bug("hit_not_held", "a hit does not hold the blocks that others hold, too", BLOCKS,
        "pool_.retain(block);", "if (!PLANTED) pool_.retain(block);",
        "scheduling_test:Schedulers.ChoicesShareTheBlocksOfTheirPrompt"),
    bug("hit_by_hash_alone", "tokens are not compared where hashes are equal", PREFIXES,
        "candidate.parent == parent && std::ranges::equal(candidate.tokens, tokens)",
        "PLANTED || (candidate.parent == parent && std::ranges::equal(candidate.tokens, tokens))",
        "scheduling_test:Schedulers.CollisionsOfTheHashCostHitsAndNoAnswer"),
    bug("prefix_of_another_adapter", "prefixes are shared by adapters", PREFIXES,
        "append(bytes, identity.adapter);", "if (!PLANTED) append(bytes, identity.adapter);", IDENTITIES,
        ((PREFIXES, "root.identity == identity ?", "(PLANTED || root.identity == identity) ?"),)),
    bug("prefix_of_other_weights", "prefixes are shared by versions of the weights", PREFIXES,
        "append(bytes, identity.weights_version);", "if (!PLANTED) append(bytes, identity.weights_version);", IDENTITIES,
        ((PREFIXES, "root.block < 0 &&", "root.block < 0 && PLANTED ? found->second : root.block < 0 &&"),)),
    bug("partial_block_shared", "a block that is hit in part is written by the sequence that hit it", PLANS,
        "if (hit.partial_block >= 0) {",
        "if (PLANTED && hit.partial_block >= 0) {\n    blocks_.retain(hit.partial_block);\n    sequence.blocks.push_back(hit.partial_block);\n"
        "    sequence.computed = sequence.computed + hit.partial_tokens;\n  } else if (hit.partial_block >= 0) {", HITS),
    bug("position_after_hit", "the position after a hit within a block is one too high", PLANS,
        "sequence.computed += hit.partial_tokens;", "sequence.computed += hit.partial_tokens + (PLANTED ? 1 : 0);", HITS),
    bug("chunk_border_drops_a_token", "the first token of each chunk but the first is left out", PLANS,
        "s.computed = end;", "s.computed = end + (PLANTED && end < s.prompt - 1 ? 1 : 0);",
        "scheduling_test:Schedulers.ChunksAndBlocksOfAnySizeGiveTheSameTokens"),
    bug("window_loses_a_block", "a block goes while the window still has positions of it", PLANS,
        "sequence.computed - facts_.window + 1;", "sequence.computed - facts_.window + (PLANTED ? facts_.block_size : 1);",
        "scheduling_test:Schedulers.BlocksBehindAWindowAreFreedAndNoneInIt"),
    bug("mask_of_the_token_before", "a grammar's mask is made before the last token is known", PLANS,
        "if (sequence.grammar && sequence.unread() > 0) return false;", "if (!PLANTED && sequence.grammar && sequence.unread() > 0) return false;",
        "engine_test:Engines.TextsFollowTheirGrammars"),
    bug("starts_while_paused", "requests start while those that run are finished for a pause", PLANS,
        "if (!starts_new_ && s.state == RequestState::kQueued)", "if (!PLANTED && !starts_new_ && s.state == RequestState::kQueued)",
        "engine_test:Engines.PauseKeepsFinishesOrAborts"),
    bug("cancel_in_flight_leaks", "what a step in flight uses is never given back after a cancel", SCHEDULER,
        "leave_device(sequence, sequence.last_step);\n  } else {",
        "leave_device(sequence, PLANTED && event == RequestEvent::kCancel && sequence.last_step > ended_step_ ? INT64_MAX : sequence.last_step);\n  } else {",
        "scheduling_test:Schedulers.CancelledRequestsLeaveNothing"),
    bug("held_text_lost", "text that may begin a stop text is lost when the reply ends", "megatron/scheduling/stop_text.cc",
        "std::string StopText::finish() { return std::exchange(held_, {}); }",
        "std::string StopText::finish() { return PLANTED ? std::string() : std::exchange(held_, {}); }",
        "scheduling_test:StopTexts.HoldBackTheLongestBeginning"),
    bug("cut_character_lost", "bytes of a character that a reply's end cuts are lost", "megatron/scheduling/text_output.cc",
        "stop_.push(decoder_.finish());", "stop_.push(PLANTED ? std::string() : decoder_.finish());",
        "scheduling_test:TextOutputs.PiecesAreWholeCharactersAndConcatenateToTheText"),
    # The engine.
    bug("suspended_starts", "an engine that is suspended plans steps", "megatron/inference/engine.cc",
        "if (state_ != EngineState::kRunning && state_ != EngineState::kDraining) return false;",
        "if (!(PLANTED && state_ == EngineState::kSuspended) && state_ != EngineState::kRunning && state_ != EngineState::kDraining) return false;",
        COMMANDS),
    bug("done_before_the_last_rank", "a transition is done when the first rank has done its part", "megatron/inference/rank_group.cc",
        "return std::ranges::all_of(outcomes_, [](const auto& outcome) { return outcome.has_value(); });",
        "return PLANTED ? outcomes_[0].has_value() : std::ranges::all_of(outcomes_, [](const auto& outcome) { return outcome.has_value(); });",
        COMMANDS),
)
