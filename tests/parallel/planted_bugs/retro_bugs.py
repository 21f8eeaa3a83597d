"""Planted bugs of retrieval. The arguments of Bug, see bugs.py."""
MODEL, FIRST = "megatron/models/retro/retro_model.cc", "megatron/models/retro/first_retro_layer.cc"
CHUNKED = "megatron/transformer/attention/chunked_cross_attention.cc"
DATABASE, NEIGHBORS = "megatron/datasets/retro/chunk_database.cc", "megatron/datasets/retro/neighbors.cc"
GOLDEN = "models_test:All/RetroGoldenTest.LossesAndGradients/retro_two"
NO_LEAK = "models_test:All/RetroGoldenTest.NoRowSeesWhatComesAfterIt/retro_two"
ALIKE = "one rank computes alike"
NO_DATA = "a proof makes up its neighbours"
GENERATOR = "megatron/inference/retrieval/retro_generator.cc"
WRITING = "inference_test:Models/GenerateWithNeighbors.EqualsTheFullForward/0"
NO_TEXT = "a proof writes no text with neighbours"


def bug(name, what, edits, rows="", prove="", unit_test="", unproved=""):
    return {"name": name, "what": what, "edits": edits, "rows": rows, "prove": prove, "unit_test": unit_test, "unproved": unproved}


RETRO_BUGS = (
    bug("retro_reads_late", "rows read what was retrieved for their chunk from the row after its last one on",
        ((CHUNKED, "at::cat({q.narrow(0, before, reading), zero_rows(q, chunks.m - 1)})",
          "at::cat({q.narrow(0, before + (PLANTED ? 1 : 0), reading - (PLANTED ? 1 : 0)), zero_rows(q, chunks.m - (PLANTED ? 0 : 1))})"),
         (CHUNKED, "at::cat({zero_rows(q, before), join_rows(y, chunks).narrow(0, 0, reading)})",
          "at::cat({zero_rows(q, before + (PLANTED ? 1 : 0)), join_rows(y, chunks).narrow(0, 0, reading - (PLANTED ? 1 : 0))})")),
        unit_test=NO_LEAK, unproved=ALIKE),
    bug("retro_encoder_reads_next_chunk", "the encoder attends to the chunk after the one that looked its neighbour up",
        ((FIRST, "encoded.states = z;", "encoded.states = PLANTED ? z.roll(-pass.place.sample.size(0), 1) : z;"),),
        unit_test=NO_LEAK, unproved=ALIKE),
    bug("retro_keeps_own_documents", "neighbours of the documents that a sample begins with are kept",
        ((NEIGHBORS, "std::find(sample.documents.begin(), sample.documents.end(), chunk.document)",
          "std::find(sample.documents.end() - (PLANTED ? 1 : std::ssize(sample.documents)), sample.documents.end(), chunk.document)"),),
        unit_test="datasets_test:RetroProjectTest.VectorsAndNeighborsAreMegatrons", unproved=NO_DATA),
    bug("retro_neighbours_of_other_chunks", "neighbours are encoded chunk by chunk and read neighbour by neighbour",
        ((MODEL, "tokens.permute({2, 1, 0, 3})", "(PLANTED ? tokens.permute({1, 2, 0, 3}) : tokens.permute({2, 1, 0, 3}))"),),
        unit_test=GOLDEN, unproved=ALIKE),
    bug("retro_encoder_grad_of_first_stage", "the encoder gets no gradient from the stages after its own",
        ((MODEL, "return {encoded, x};", "return {PLANTED ? encoded.detach() : encoded, x};"),),
        "pp4_retro_rope", "retro pp2"),
    bug("retro_encoder_again_without_stream", "an encoder that is computed again gives the stream no gradient",
        ((FIRST, "encoder_.forward(neighbors, reading(z, chunks, pass, retrieved)).to(type)",
          "encoder_.forward(neighbors, reading(PLANTED && stacks_.decoder.recomputes(\"retro_encoder\") ? z.detach() : z, chunks, pass, "
          "retrieved)).to(type)"),),
        "tp2_sp_encoder_retro", "retro tp2 sp again"),
    bug("retro_missing_neighbours_read", "tokens that stand in the place of a neighbour that is not there are attended to",
        ((CHUNKED, "options.mask = retrieved.mask.expand(", "if (!PLANTED) options.mask = retrieved.mask.expand("),),
        unit_test="models_test:All/RetroGoldenTest.MissingNeighborsAreNotRead/retro_two", unproved=ALIKE),
    bug("retro_goes_on_in_next_document", "what follows the last chunk of a document is the first one of the next",
        ((DATABASE, "if (next.data_set != here.data_set || next.document != here.document) return std::nullopt;",
          "if (!PLANTED && (next.data_set != here.data_set || next.document != here.document)) return std::nullopt;"),),
        unit_test="datasets_test:RetroProjectTest.ContinuationsEndWithTheirDocument", unproved=NO_DATA),
    bug("retro_chunks_of_local_rows", "every tensor rank gives the encoder the first rows of a chunk, under sequence parallelism",
        ((FIRST, "rows.narrow(0, groups_.tp.rank() * own, own)", "rows.narrow(0, PLANTED ? 0 : groups_.tp.rank() * own, own)"),),
        "tp2_sp_retro_rope", "retro tp2 sp"),
    bug("retro_encoder_reads_before_norm", "the encoder attends to the stream before the norm",
        ((FIRST, "layer_->cross_attention().input_norm()->forward(x);", "PLANTED ? x : layer_->cross_attention().input_norm()->forward(x);"),),
        unit_test=GOLDEN, unproved=ALIKE),
    bug("retro_neighbours_of_any_samples", "neighbours of other samples than those of the run are read",
        ((NEIGHBORS, "out.folder = project.query_folder(split, samples.fingerprint());",
          "out.folder = PLANTED ? std::filesystem::directory_iterator(project.folder() / \"query\")->path() "
          ": project.query_folder(split, samples.fingerprint());"),),
        unit_test="datasets_test:RetroProjectTest.NeighborsOfOtherSamplesAreRefusedByName", unproved=NO_DATA),
    bug("retro_chunks_of_first_data_set", "chunks of all data sets are read from the first one",
        ((DATABASE, "static_cast<uint32_t>(d), first, i + 1,", "PLANTED ? 0 : static_cast<uint32_t>(d), first, i + 1,"),),
        unit_test="datasets_test:RetroProjectTest.VectorsAndNeighborsAreMegatrons", unproved=NO_DATA),
    bug("retro_writes_late", "while a text is written the last token of a chunk does not read what was retrieved for it",
        ((GENERATOR, "(position - first + 1) / m;", "(position - first + (PLANTED ? 0 : 1)) / m;"),), unit_test=WRITING, unproved=NO_TEXT),
    bug("retro_writes_without_earlier_rows", "the encoder does not see the rows of a chunk that earlier steps computed",
        ((GENERATOR, ": own * m_ + position - cut.begin(cut.chunk_of(position));",
          ": PLANTED ? slots_ * m_ + t_ : own * m_ + position - cut.begin(cut.chunk_of(position));"),), unit_test=WRITING, unproved=NO_TEXT),
    bug("retro_keeps_first_new_chunk", "a text keeps what was retrieved for the first chunk of its prompt, not the last",
        ((GENERATOR, "last_chunks_.push_back(new_.at({slot, last}));",
          "last_chunks_.push_back(PLANTED ? 0 : new_.at({slot, last}));"),), unit_test=WRITING, unproved=NO_TEXT),
)
