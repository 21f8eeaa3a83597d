#include "megatron/comm/peer_rows.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kSignalBytes = 4;

int64_t align_slot(int64_t bytes) { return (bytes + 255) / 256 * 256; }
int64_t bytes_of_signals(int64_t group_size) {
  return align_slot(kSignalBytes * 2 * PeerRows::kSlots * group_size);
}

}  // namespace

int64_t PeerRows::memory_bytes(int64_t group_size, int64_t slot_bytes) {
  return bytes_of_signals(group_size) + kSlots * align_slot(slot_bytes);
}

void PeerRows::reserve(at::Device device, int64_t slot_bytes) {
  if (group_.size() == 1 || (peers_ != nullptr && slot_bytes <= slot_bytes_)) return;
  MEGATRON_ASSERT(opened_ == closed_, "room for rows is made in the middle of an exchange");
  if (peers_ != nullptr) {
    // No rank's signals are on their way to the memory that is freed.
    const at::Tensor ended = at::zeros({1}, memory_.options().dtype(at::kInt));
    group_.all_reduce(ended)->wait();
    ended.item<int>();
    peers_ = nullptr;
  }
  slot_bytes_ = align_slot(slot_bytes);
  memory_ = at::zeros({memory_bytes(group_.size(), slot_bytes_)},
                      at::TensorOptions().dtype(at::kByte).device(device));
  SharedMemory shared = share_memory(memory_, group_);
  MEGATRON_CHECK(shared.peers != nullptr,
                 "tokens cannot be written into the memory of the ranks of their experts: ",
                 shared.obstacle, "\nhint: --moe-token-dispatcher-type alltoall");
  peers_ = std::move(shared.peers);
  opened_ = closed_ = 0;
}

PeerRowExchange::PeerRowExchange(PeerRows& rows, const std::vector<Source>& sources)
    : rows_(rows), number_(rows.opened_++), slot_(static_cast<int>(number_ % PeerRows::kSlots)) {
  MEGATRON_ASSERT(number_ < rows.closed_ + PeerRows::kSlots, "exchange ", number_,
                  " was opened before ", number_ - PeerRows::kSlots, " was closed");
  const int size = rows.group_.size(), own = rows.group_.rank();
  const int64_t begin = bytes_of_signals(size) + slot_ * rows.slot_bytes_;
  PeerMemory& peers = *rows.peers_;
  sent_ = peers.run([&] {
    for (int step = 0; step < size; ++step) {
      const int to = (own + step) % size;
      if (to != own && number_ >= PeerRows::kSlots)
        peers.await(to, word(/*free=*/true, to),
                    static_cast<uint32_t>(number_ - PeerRows::kSlots + 1));
      for (const Source& source : sources) {
        std::vector<PeerPart> parts;
        for (const Piece& piece : source.pieces) {
          if (piece.to != to || piece.bytes == 0) continue;
          MEGATRON_ASSERT(piece.byte >= 0 && piece.byte + piece.bytes <= rows.slot_bytes_,
                          piece.bytes, " bytes at ", piece.byte, " of a slot of ",
                          rows.slot_bytes_);
          parts.push_back({to, begin + piece.byte, piece.from, piece.bytes});
          if (to != own) rows.bytes_sent_ += piece.bytes;
        }
        if (!parts.empty()) peers.write_parts(source.rows.view({-1}).view(at::kByte), parts);
      }
      if (to != own)
        peers.signal(to, word(/*free=*/false, own), static_cast<uint32_t>(number_ + 1));
    }
  });
}

PeerRowExchange::~PeerRowExchange() {
  if (!open_ || std::uncaught_exceptions() > 0) return;
  try {
    close();
  } catch (const std::exception&) {
    // A peer is gone: the group's next call reports it.
  }
}

int64_t PeerRowExchange::word(bool free, int sender) const {
  return (int64_t{free} * PeerRows::kSlots + slot_) * rows_.group_.size() + sender;
}

void PeerRowExchange::await_arrival() {
  if (std::exchange(arrived_, true)) return;
  sent_->wait();
  const int size = rows_.group_.size(), own = rows_.group_.rank();
  for (int from = 0; from < size; ++from)
    if (from != own)
      rows_.peers_->await(from, word(/*free=*/false, from), static_cast<uint32_t>(number_ + 1));
}

at::Tensor PeerRowExchange::received(int64_t byte, at::IntArrayRef shape, at::ScalarType type) {
  MEGATRON_ASSERT(open_, "an exchange of rows is read after its end");
  await_arrival();
  const int64_t bytes = c10::multiply_integers(shape) * static_cast<int64_t>(elementSize(type));
  const int64_t begin = bytes_of_signals(rows_.group_.size()) + slot_ * rows_.slot_bytes_ + byte;
  return rows_.memory_.narrow(0, begin, bytes).view(type).view(shape);
}

void PeerRowExchange::close() {
  if (!std::exchange(open_, false)) return;
  await_arrival();
  const int size = rows_.group_.size(), own = rows_.group_.rank();
  for (int step = 1; step < size; ++step)
    rows_.peers_->signal((own + step) % size, word(/*free=*/true, own),
                         static_cast<uint32_t>(number_ + 1));
  rows_.closed_early_.push_back(number_);
  std::vector<int64_t>& early = rows_.closed_early_;
  while (std::erase(early, rows_.closed_) > 0) ++rows_.closed_;
}

}  // namespace megatron
