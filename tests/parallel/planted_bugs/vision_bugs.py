"""Planted bugs of models that read images. The arguments of Bug, see bugs.py."""
from stack_bugs import bug, unit_bugs

MODEL, ENCODER = "megatron/models/mimo/mimo_model.cc", "megatron/models/vision/vision_encoder.cc"
GRADS = "megatron/distributed/grad_buffer.cc"
PACKING, SUBLAYER = "megatron/models/vision/packed_images.cc", "megatron/transformer/layer/sublayer.cc"
FAMILIES, CONVERT = "megatron/interop/huggingface/hf_multimodal_families.cc", "megatron/interop/huggingface/hf_convert.cc"
GOLDEN = "Families/HfVisionGolden.LogitsAndGradientsWithImages/"
vision_bug = unit_bugs("models_test", "one rank computes alike")
training_bug = unit_bugs("mimo_test", "one rank computes alike")


VISION_BUGS = (
    vision_bug("vision_token_looked_up", "an image token is looked up, too", MODEL, "tokens.masked_fill(tokens == own_.image_token_id, kNoToken)",
               "PLANTED ? tokens : tokens.masked_fill(tokens == own_.image_token_id, kNoToken)", GOLDEN + "llava"),
    vision_bug("vision_places_of_samples", "features are placed sample by sample in rows that go token by token", MODEL,
               "return places.remainder(s) * b + places.div(s, \"floor\");",
               "return PLANTED ? places : places.remainder(s) * b + places.div(s, \"floor\");", GOLDEN + "llava"),
    bug("vision_partial_gradients", "gradients of the encoder are not summed over tensor ranks that hold different rows",
        ((MODEL, "if (groups.tp.size() > 1) parameter.placement.partial_grad.insert(Axis::kTensor);",
          "if (!PLANTED && groups.tp.size() > 1) parameter.placement.partial_grad.insert(Axis::kTensor);"),),
        "tp4_sp_llava", "llava tp2 sp"),
    bug("vision_copies_summed", "gradients of features that tensor ranks hold as copies are summed over them",
        (("megatron/tensor_parallel/mappings.cc", "return pair(x, tp, all_gather_first_dim, own_slice_first_dim);",
          "return pair(x, tp, all_gather_first_dim, PLANTED ? reduce_scatter_first_dim : own_slice_first_dim);"),),
        "tp4_llava", "llava tp2"),
    bug("vision_gather_sliced", "of the gradients of features, which are of each rank's rows, a rank takes its own part, unsummed",
        ((MODEL, "return config().sequence_parallel ? gather_from", "return !PLANTED && config().sequence_parallel ? gather_from"),),
        "tp4_sp_llava", "llava tp2 sp"),
    bug("vision_plan_order", "features of images that another rank encodes are taken from the first rank's",
        ((PACKING, "out[k] += images[k].owner * most;", "out[k] += PLANTED ? 0 : images[k].owner * most;"),),
        "tp4_llava", "llava tp2"),
    bug("vision_newline_copies", "tensor ranks sum their copies of the gradient of the vector that ends rows",
        ((MODEL, "if (config().sequence_parallel) image_newline_->placement", "if (PLANTED || config().sequence_parallel) image_newline_->placement"),),
        "tp2_llava_tiles", "llava next tp2"),
    bug("vision_rank_skips_exchange", "a rank without images does not take part in the exchanges of the encoder",
        ((MODEL, "(all->all_pictures == 0 && !every_rank_encodes())", "(all->all_pictures == 0 && (PLANTED || !every_rank_encodes()))"),),
        "dp2_zero3_llava", "llava dp2 zero3"),
    training_bug("vision_frozen_language_cuts", "no gradient goes through a frozen language model to the projector", MODEL,
                 "return placed.view({s, b, h});",
                 "return PLANTED && !trains(language_model_) ? placed.view({s, b, h}).detach() : placed.view({s, b, h});",
                 "Mimo.GradientsGoThroughAFrozenLanguageModel"),
    training_bug("vision_frozen_keeps_activations", "an encoder that is frozen keeps its activations for a backward", MODEL,
                 "at::GradMode::is_enabled() && trains(*vision_model_)", "at::GradMode::is_enabled() && (PLANTED || trains(*vision_model_))",
                 "Mimo.FrozenPartsHoldNoActivations"),
    training_bug("vision_old_gradient", "after a step without images the gradient of the one before is used again", GRADS,
                 "if (stale_[parameter]) views_[parameter].zero_();", "if (!PLANTED && stale_[parameter]) views_[parameter].zero_();",
                 "Mimo.AStepWithoutImagesHasZeroGradients"),
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
