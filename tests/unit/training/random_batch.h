// A micro-batch of random tokens, of the form that the task of a run reads.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "megatron/comm/parallel_groups.h"
#include "megatron/models/mimo/mimo_model.h"
#include "megatron/models/retro/retro_config.h"
#include "megatron/models/t5/t5_config.h"
#include "megatron/tensor/torch.h"
#include "megatron/training/arguments/mimo_rules.h"
#include "megatron/training/setup.h"
#include "megatron/transformer/context_parallel/context_parallel.h"

namespace megatron {

// As many pictures as the sequences may have, divided over the ranks that divide them; of own
// sizes one that fills a sequence.
inline void fill_with_images(const Arguments& a, const ParallelGroups& groups, Batch& batch) {
  auto own = own_config<MimoConfig>(a.own);
  if (own.has_own_sizes()) {
    const int64_t most = own_config<MimoDataConfig>(a.own).max_patches_per_sequence / 4;
    const int64_t all = most > 0 ? most : a.transformer.seq_length;
    int64_t rows = 1;
    for (int64_t k = 1; k * k <= all; ++k)
      if (all % k == 0) rows = k;
    own.img_h = 2 * own.patch_dim * rows;
    own.img_w = 2 * own.patch_dim * (all / rows);
  }
  const int64_t b = batch["tokens"].size(0), s = a.transformer.seq_length;
  const at::Tensor tokens = at::randint(0, 500, {b, s}, at::kLong);
  const ImageRanks z = image_ranks(a, groups);
  const int64_t room = s / own.features(),
                limit = own_config<MimoDataConfig>(a.own).max_patches_per_sequence / own.patches();
  std::vector<SeenImage> images;
  int64_t pictures = 0;
  for (int64_t i = 0; i < b; ++i)
    for (int64_t k = 0; k < (limit > 0 ? std::min(room, limit) : room); ++k) {
      tokens[i].narrow(0, k * own.features(), own.features()).fill_(own.image_token_id);
      const int owner = static_cast<int>(images.size()) % z.size;
      pictures += owner == z.rank;
      images.push_back({i, own.patch_rows(), own.patch_columns(), 1, {}, {}, owner});
    }
  PackedImages packed = pack_images(
      own, images,
      z.reads ? at::randint(0, 256, {pictures * own.patches(), own.patch_elements()}, at::kByte)
              : at::Tensor(),
      at::randn({3, 256}), {tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())},
      b, own.image_token_id, z.rank, z.size, {}, z.replicas);
  if (z.parts > 1) packed = packed.of_tokens(zigzag_positions(s, z.parts, z.part), b, s);
  batch.set("tokens", zigzag_slice(tokens, 1, groups.cp));
  batch.images = std::make_shared<const PackedImages>(std::move(packed));
}

// Sounds of equal lengths that fill the sequences, at most 30 s each, divided in the same way.
inline void fill_with_sounds(const Arguments& a, const ParallelGroups& groups, Batch& batch) {
  const auto& own = own_config<MimoConfig>(a.own);
  const int64_t b = batch["tokens"].size(0), s = a.transformer.seq_length,
                longest = kAudioRows / own.rows_of_a_feature(),
                count = own.stacks() ? s / longest : (s + longest - 1) / longest,
                features = own.stacks() ? longest : s / count,
                frames = 2 * own.rows_of_a_feature() * features;
  const ImageRanks z = image_ranks(a, groups);
  const at::Tensor tokens = at::randint(0, 500, {b, s}, at::kLong);
  tokens.narrow(1, 0, count * features).fill_(own.audio_token_id);
  std::vector<SeenSound> sounds;
  int64_t read = 0;
  for (int64_t i = 0; i < b * count; ++i) {
    const int owner = static_cast<int>(i) % z.size;
    if (owner == z.rank) read += packed_frames(own, frames);
    sounds.push_back({i / count, frames, owner});
  }
  PackedSounds packed =
      pack_sounds(own, sounds, z.reads ? at::randn({read, own.audio_mel_bins}) : at::Tensor(),
                  {tokens.const_data_ptr<int64_t>(), static_cast<size_t>(tokens.numel())}, b,
                  own.audio_token_id, z.rank, z.size, z.replicas);
  if (z.parts > 1) packed = packed.of_tokens(zigzag_positions(s, z.parts, z.part), b, s);
  batch.set("tokens", zigzag_slice(tokens, 1, groups.cp));
  batch.sounds = std::make_shared<const PackedSounds>(std::move(packed));
}

// The columns of an encoder-decoder, without padding.
inline void fill_with_pairs(const Arguments& a, const ParallelGroups& groups, Batch& batch) {
  const int64_t b = a.training.micro_batch_size, s = a.transformer.seq_length,
                s_d = own_config<T5Config>(a.own).decoder_seq_length, ranks = groups.cp.size();
  batch.set("text_enc", at::randint(0, 500, {b, s / ranks}, at::kLong));
  batch.set("enc_mask", at::ones({b, s}, at::kByte));
  batch.set("text_dec", at::randint(0, 500, {b, s_d / ranks}, at::kLong));
  batch.set("dec_mask", at::ones({b, s_d}, at::kByte));
  batch.set("labels", at::randint(0, 500, {b, s_d / ranks}, at::kLong));
  batch.set("loss_mask", at::ones({b, s_d / ranks}));
}

inline Batch random_batch(const Arguments& a, const ParallelGroups& groups) {
  const int64_t b = a.training.micro_batch_size * image_ranks(a, groups).merged(),
                s = a.transformer.seq_length / groups.cp.size();
  Batch batch;
  if (a.training.task == "t5") {
    fill_with_pairs(a, groups, batch);
  } else {
    batch.set("tokens", at::randint(0, 500, {b, s}, at::kLong));
    batch.set("labels", at::randint(0, 500, {b, s}, at::kLong));
    batch.set("loss_mask", at::ones({b, s}));
  }
  if (a.training.task == "retro") {
    const auto& own = own_config<RetroConfig>(a.own);
    const int64_t m = own.retro_chunk_length, k = own.retro_num_neighbors;
    batch.set("neighbor_tokens", at::randint(0, 500, {b, s / m, k, 2 * m}, at::kLong));
    batch.set("neighbor_mask", at::ones({b, s / m, k}, at::kByte));
  }
  if (a.training.task == "mimo" && own_config<MimoConfig>(a.own).sees())
    fill_with_images(a, groups, batch);
  else if (a.training.task == "mimo")
    fill_with_sounds(a, groups, batch);
  batch.place.sample = at::arange(b, at::kLong);
  batch.place.position =
      zigzag_positions(a.transformer.seq_length, groups.cp.size(), groups.cp.rank());
  return batch;
}

}  // namespace megatron
