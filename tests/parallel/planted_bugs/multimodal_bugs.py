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
)
