"""Planted bugs of models that read images, which unit tests catch. The arguments of Bug, see bugs.py."""
from stack_bugs import unit_bugs

MODEL, ENCODER = "megatron/models/mimo/mimo_model.cc", "megatron/models/vision/vision_encoder.cc"
PACKING, SUBLAYER = "megatron/models/vision/packed_images.cc", "megatron/transformer/layer/sublayer.cc"
FAMILIES, CONVERT = "megatron/interop/huggingface/hf_multimodal_families.cc", "megatron/interop/huggingface/hf_convert.cc"
GOLDEN = "Families/HfVisionGolden.LogitsAndGradientsWithImages/"
vision_bug = unit_bugs("models_test", "training of models that read images is not built")


VISION_BUGS = (
    vision_bug("vision_token_looked_up", "an image token is looked up, too", MODEL, "tokens.masked_fill(tokens == own_.image_token_id, kNoToken)",
               "PLANTED ? tokens : tokens.masked_fill(tokens == own_.image_token_id, kNoToken)", GOLDEN + "llava"),
    vision_bug("vision_places_of_samples", "features are placed sample by sample in rows that go token by token", MODEL,
               "return places.remainder(s) * b + places.div(s, \"floor\");",
               "return PLANTED ? places : places.remainder(s) * b + places.div(s, \"floor\");", GOLDEN + "llava"),
    vision_bug("vision_partial_gradients", "gradients of the encoder are not summed over tensor ranks that hold different rows", MODEL,
               "if (config().sequence_parallel) parameter.placement.partial_grad.insert(Axis::kTensor);",
               "if (!PLANTED && config().sequence_parallel) parameter.placement.partial_grad.insert(Axis::kTensor);",
               "Families/HfVisionGolden.GradientsOnTwoTensorRanks/llava"),
    vision_bug("vision_class_row_kept", "the class row is the first feature, the last patch none", ENCODER, "narrow(1, first, p + 1 - first)",
               "narrow(1, PLANTED ? 0 : first, p + 1 - first)", GOLDEN + "llava"),
    vision_bug("vision_layer_behind", "the output of the layer behind the configured one is taken", FAMILIES, "all + 1 + feature",
               "all + (PLANTED ? 2 : 1) + feature", GOLDEN + "llava"),
    vision_bug("vision_shuffle_transposed", "the features of a cell come column by column", ENCODER, ".transpose(2, 3)",
               ".permute(PLANTED ? std::vector<int64_t>{0, 1, 3, 4, 2, 5} : std::vector<int64_t>{0, 1, 3, 2, 4, 5})",
               "HfVisionModels.CellsOfTwoByTwoFeatures"),
    vision_bug("vision_last_newline", "the last row of an image's tiles has no end", PACKING, "x % columns); } order.push_back(kNewline);",
               "x % columns); } if (!PLANTED || y + 1 < kept.top + kept.size.height) order.push_back(kNewline);", GOLDEN + "llava_next"),
    vision_bug("vision_sides_exchanged", "height and width of an image are exchanged where its padding is cut", PACKING, "unpadded_map(image.size,",
               "unpadded_map(PLANTED ? ImageSize{image.size.width, image.size.height} : image.size,", GOLDEN + "llava_next"),
    vision_bug("vision_branch_factors", "branches of InternViT are added as they are", SUBLAYER,
               "scale_ != nullptr ? branch * differentiable(*scale_) : branch",
               "!PLANTED && scale_ != nullptr ? branch * differentiable(*scale_) : branch", GOLDEN + "internvl"),
    vision_bug("vision_carried_dropped", "an export leaves out what the model does not compute with", CONVERT,
               "if (family->model_type == model_type_of(origin_.config_json)) add_carried();",
               "if (!PLANTED && family->model_type == model_type_of(origin_.config_json)) add_carried();",
               "HfVisionModels.ThereAndBackAreTheSameUnderEachSpelling"),
)
