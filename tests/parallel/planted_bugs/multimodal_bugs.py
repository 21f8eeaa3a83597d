"""Planted bugs of data with images and sound, which unit tests catch. The arguments of Bug, see bugs.py."""
from stack_bugs import bug

DATA = "megatron/datasets/multimodal/"


def data_bug(name, what, file, old, new, test):
    return bug(name, what, ((DATA + file, old, new),), "", "", "multimodal_test:" + test, "data are read before any layout")


MULTIMODAL_BUGS = (
    data_bug("multimodal_archive_order", "the images of a sample come in the order of the archive, whatever their numbers", "webdataset.cc",
             "return number_of(a->extension) < number_of(b->extension);",
             "return !PLANTED && number_of(a->extension) < number_of(b->extension);", "Shard.MediaComeInTheOrderOfTheirNumbers"),
    data_bug("multimodal_last_dot", "a key goes on up to the last dot of a name", "webdataset.cc",
             "const size_t dot = name.find('.', base);", "const size_t dot = PLANTED ? name.rfind('.') : name.find('.', base);",
             "Tar.SamplesAreThoseOfWebDataset"),
    data_bug("multimodal_links_followed", "links lead out of the folder of media", "media_files.cc",
             "MEGATRON_CHECK(inside(file), where,", "MEGATRON_CHECK(PLANTED || inside(file), where,",
             "Sources.PathsStayBelowTheFolderOfMedia"),
    data_bug("multimodal_places_uncounted", "media without a place are dropped", "multimodal_row.cc",
             "if (list.placeholders != list.media.size())",
             "if (PLANTED ? list.placeholders > list.media.size() : list.placeholders != list.media.size())",
             "Rows.PlacesAndMediaAreEqualInNumber"),
    data_bug("multimodal_last_row_masked", "the last row of an image does not predict the text behind it", "fused_tokens.cc",
             "loss_mask[i] = ids[i + 1] >= 0 ? 1.0F : 0.0F;", "loss_mask[i] = ids[i + 1] >= 0 && !(PLANTED && ids[i] < 0) ? 1.0F : 0.0F;",
             "Fusion.TheLastRowOfAnImagePredictsTheTextBehindIt"),
    data_bug("multimodal_label_one_off", "the label of an image's last row is one behind", "fused_tokens.cc",
             "labels[i] = id(i + 1);", "labels[i] = id(PLANTED && ids[i] < 0 && i + 2 < ids.size() ? i + 2 : i + 1);",
             "Fusion.TheLastRowOfAnImagePredictsTheTextBehindIt"),
    data_bug("multimodal_cut_through_image", "a long sample is cut through its last image", "fused_tokens.cc",
             "return media <= room ? room : 0;", "return PLANTED || media <= room ? room : 0;",
             "Fusion.OnlyTextBehindTheLastImageIsCut"),
    data_bug("multimodal_typed_token", "the spelling of an image's token in a text becomes that token", "multimodal_encoder.cc",
             "const auto [at, size] = find_literal(text, done);",
             "const auto [at, size] = PLANTED ? std::pair(std::string_view::npos, size_t{0}) : find_literal(text, done);",
             "Encoder.SpellingsOfTokensInTextsAreErrors"),
    data_bug("multimodal_spans_not_moved", "what the assistant wrote is looked for where it was before images were expanded", "multimodal_encoder.cc",
             "replace_in_spans(out.trained, found.first, end, medium.text.size());",
             "if (!PLANTED) replace_in_spans(out.trained, found.first, end, medium.text.size());", "Families/Expansion.IsThatOfTransformers/internvl"),
    data_bug("multimodal_unpacked_runs", "the rows of a sequence's later samples are looked for from its beginning", "multimodal_dataset.cc",
             "out.push_back({begin + run.token + longer,", "out.push_back({(PLANTED ? 0 : begin) + run.token + longer,",
             "Indexed.RunsLieWhereTheirRowsAre"),
    data_bug("multimodal_patches_unbounded", "sequences are packed by tokens alone", "multimodal_dataset.cc",
             "patches += image_patches(index->rules(), index->facts(sample, m));",
             "if (!PLANTED) patches += image_patches(index->rules(), index->facts(sample, m));",
             "Indexed.PatchesOfASequenceStayWithinTheirCapacity"),
    data_bug("multimodal_second_image_first", "later media of the data set are offset by one", "multimodal_index.cc",
             "return media[static_cast<size_t>(begin_of(i).media + medium)];",
             "return media[static_cast<size_t>(begin_of(PLANTED && i > 0 ? i - 1 : i).media + medium)];",
             "Indexed.ArchivesAndFilesGiveTheSameSamples"),
)
