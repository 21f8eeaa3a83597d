#include "megatron/comm/peer_mailbox.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "megatron/base/check.h"
#include "megatron/tensor/torch.h"

namespace megatron {
namespace {

constexpr int64_t kWordBytes = 4;
constexpr int64_t kAlignedWords = 64;  // parts start at multiples of 256 bytes

int64_t aligned(int64_t words) {
  return (words + kAlignedWords - 1) / kAlignedWords * kAlignedWords;
}
int64_t words_of_part(int64_t bytes) { return aligned((bytes + kWordBytes - 1) / kWordBytes); }
int64_t signal_words(int64_t group_size) { return aligned(2 * PeerMailbox::kSlots * group_size); }

}  // namespace

int64_t PeerMailbox::memory_bytes(int64_t group_size, int64_t part_bytes) {
  return kWordBytes * (signal_words(group_size) + kSlots * group_size * words_of_part(part_bytes));
}

void PeerMailbox::open(at::Device device, int64_t part_bytes) {
  const int64_t part_words = words_of_part(part_bytes);
  if (group_.size() == 1 || !obstacle_.empty() || part_words <= part_words_) return;
  MEGATRON_ASSERT(opened_ == closed_,
                  "a mailbox is opened for larger parts in the middle of an exchange");
  memory_ = at::zeros({memory_bytes(group_.size(), part_bytes) / kWordBytes},
                      at::TensorOptions().dtype(at::kInt).device(device));
  SharedMemory shared = share_memory(memory_, group_);
  peers_ = std::move(shared.peers);
  obstacle_ = std::move(shared.obstacle);
  opened_ = closed_ = 0;
  part_words_ = peers_ ? part_words : 0;
  if (!peers_) memory_.reset();
}

bool PeerMailbox::fits(const at::Tensor& part) const {
  const auto bytes = static_cast<int64_t>(part.nbytes());
  return peers_ && bytes > 0 && bytes % kWordBytes == 0 && bytes / kWordBytes <= part_words_ &&
         part.device().type() == memory_.device().type();
}

void PeerMailbox::postpone(double flops, std::function<void()> work) {
  postponed_flops_ += flops;
  postponed_.push_back(std::move(work));
}

void PeerMailbox::run_postponed() {
  postponed_flops_ = 0.0;
  for (const std::function<void()>& work : std::exchange(postponed_, {})) work();
}

int64_t PeerMailbox::open_exchange() {
  if (opened_ >= closed_ + kSlots) run_postponed();
  MEGATRON_ASSERT(opened_ < closed_ + kSlots, "exchange ", opened_, " was opened before ",
                  opened_ - kSlots, " was closed");
  return opened_++;
}

PeerExchange::PeerExchange(PeerMailbox& mailbox, const at::Tensor& part)
    : mailbox_(mailbox),
      shape_(part.sizes().vec()),
      type_(part.scalar_type()),
      words_(static_cast<int64_t>(part.nbytes()) / kWordBytes),
      number_(mailbox.open_exchange()),
      slot_(static_cast<int>(number_ % PeerMailbox::kSlots)),
      arrived_(static_cast<size_t>(mailbox.group_.size()), false) {
  MEGATRON_ASSERT(mailbox.fits(part), "a part of ", part.nbytes(), " bytes in a mailbox for ",
                  mailbox.part_words_ * kWordBytes);
}

PeerExchange::~PeerExchange() {
  if (!open_ || std::uncaught_exceptions() > 0) return;
  try {
    close();
  } catch (const std::exception&) {
    // A peer is gone: the group's next call reports it.
  }
}

int64_t PeerExchange::word(bool free, int sender) const {
  return (int64_t{free} * PeerMailbox::kSlots + slot_) * mailbox_.group_.size() + sender;
}

at::Tensor PeerExchange::place(int from, int count) const {
  const int size = mailbox_.group_.size();
  std::vector<int64_t> shape = shape_;
  shape[0] *= count;
  return mailbox_.memory_
      .narrow(0, signal_words(size) + slot_ * size * mailbox_.part_words_ + from * words_,
              count * words_)
      .view(type_)
      .view(shape);
}

void PeerExchange::post(int to, const at::Tensor& part) {
  const int size = mailbox_.group_.size(), own = mailbox_.group_.rank();
  MEGATRON_ASSERT(open_ && part.sizes() == at::IntArrayRef(shape_) && part.scalar_type() == type_,
                  "a part ", part.toString(), part.sizes(), " in an exchange of ",
                  at::IntArrayRef(shape_));
  PeerMemory& peers = *mailbox_.peers_;
  const std::shared_ptr<Work> work = peers.run([&] {
    if (to != own && number_ >= PeerMailbox::kSlots)
      peers.await(to, word(/*free=*/true, to),
                  static_cast<uint32_t>(number_ - PeerMailbox::kSlots + 1));
    const int64_t begin = signal_words(size) + slot_ * size * mailbox_.part_words_ + own * words_;
    peers.write({{to, begin, part.view({-1}).view(at::kInt)}});
    if (to != own) peers.signal(to, word(/*free=*/false, own), static_cast<uint32_t>(number_ + 1));
  });
  if (to == own)
    own_ = work;
  else
    posts_.push_back(work);
}

at::Tensor PeerExchange::part(int from) {
  mailbox_.run_postponed();
  if (from == mailbox_.group_.rank()) {
    MEGATRON_ASSERT(own_ != nullptr, "a rank's own part was not posted");
    own_->wait();
  } else if (!std::exchange(arrived_[from], char{1})) {
    mailbox_.peers_->await(from, word(/*free=*/false, from), static_cast<uint32_t>(number_ + 1));
  }
  return place(from, 1);
}

at::Tensor PeerExchange::parts(int first, int count) {
  for (int from = first; from < first + count; ++from) part(from);
  return place(first, count);
}

void PeerExchange::close() {
  if (!std::exchange(open_, false)) return;
  const int size = mailbox_.group_.size(), own = mailbox_.group_.rank();
  if (own_) own_->wait();
  for (const std::shared_ptr<Work>& post : posts_) post->wait();
  for (int peer = 0; peer < size; ++peer)
    if (peer != own) part(peer);  // unread parts must also have arrived before the slot is freed
  for (int step = 1; step < size; ++step) {
    const int peer = (own + step) % size;
    mailbox_.peers_->signal(peer, word(/*free=*/true, own), static_cast<uint32_t>(number_ + 1));
  }
  mailbox_.closed_early_.push_back(number_);
  std::vector<int64_t>& early = mailbox_.closed_early_;
  while (std::erase(early, mailbox_.closed_) > 0) ++mailbox_.closed_;
}

}  // namespace megatron
