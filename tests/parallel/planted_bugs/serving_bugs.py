"""Planted bugs of decoding: of draws, of the runner, of what sequences own. The arguments of Bug, see bugs.py.

The matrix trains; what a text gets is shown by unit tests, which compare with each sequence alone, and by the last proof of `prove`.
"""
SAMPLER, LOGITS, DRAWS = "megatron/inference/sampling.cc", "megatron/tensor/decoding/sampling.cc", "megatron/kernels/sampling_cpu.cc"
RUNNER, PAGED, ADAPTERS = ("megatron/inference/model_runner.cc", "megatron/tensor/attention/paged_attention.cc",
                           "megatron/tensor_parallel/lora_adapter.cc")
STATES, CACHE, STORE = ("megatron/tensor/decoding/state_buffer.cc", "megatron/transformer/attention/kv_cache.cc",
                        "megatron/nn/forward_parameter_store.cc")
UNPROVED = "decoding: no proof has it"
ALONE, KINDS, OWNED = ("model_runner_test:ModelRunner.EverySequenceGetsWhatItGetsAlone", "model_runner_test:ModelRunner.ServesEveryKindOfModel",
                       "model_runner_test:ModelRunner.SequencesOwnStatesAndBringRows")
RANKS = "model_runner_test:ModelRunner.RanksServeWhatOneRankServes"


def bug(name, what, file, old, new, unit_test, more=(), prove=""):
    return {"name": name, "what": what, "edits": ((file, old, new), *more), "rows": "", "prove": prove, "unit_test": unit_test,
            "unproved": "" if prove else UNPROVED}


SERVING_BUGS = (
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
        prove="gpt pp2"),
    bug("adapter_rows", "an adapter reads the first rows of a batch in place of its own", ADAPTERS,
        "inner(as_matrix(x).index_select(0, rows))", "inner(as_matrix(x).index_select(0, PLANTED ? at::arange(rows.size(0), rows.options()) : rows))",
        "model_runner_test:Models/Adapters.RowsOfOneBatchTakeTheirOwn/llama_all"),
    bug("fp8_copies_stay", "quantised copies of weights survive an exchange of the weights", STORE,
        "copies_.clear();\n  ++version_;", "copies_.clear();\n  if (!PLANTED) ++version_;",
        "model_runner_test:ServedWeights.InFp8AreHeldOnceAndMultiplyAsInTraining",
        ((STORE, "*copies->second = {};", "if (!PLANTED) *copies->second = {};"),)),
)
