#include "megatron/media/log_mel.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "megatron/base/check.h"
#include "megatron/media/detail/fourier.h"

namespace megatron {
namespace {

constexpr double kNyquist = 8000, kLeastPower = 1e-10;
// Slaney's scale: linear up to 1 kHz, then 27 steps for each factor of 6.4.
constexpr double kKnee = 1000, kMelsAtKnee = 15;
const double kLogStep = std::log(6.4) / 27;

double mel_of(double hertz) {
  return hertz < kKnee ? 3 * hertz / 200 : kMelsAtKnee + std::log(hertz / kKnee) / kLogStep;
}
double hertz_of(double mel) {
  return mel < kMelsAtKnee ? 200 * mel / 3 : kKnee * std::exp(kLogStep * (mel - kMelsAtKnee));
}

constexpr int64_t kClipFrames = kMelClip / kMelHop;

int64_t clips_of(int64_t samples) { return (samples + kMelClip - 1) / kMelClip; }

// What a filter weighs, without the bins at which it is zero.
struct SparseFilter {
  int64_t first = 0;
  std::vector<double> weights;
};

std::vector<SparseFilter> sparse_filters(int mels) {
  std::vector<SparseFilter> out;
  for (const auto& filter : mel_filters(mels)) {
    const auto positive = [](double weight) { return weight > 0; };
    const auto begin = std::find_if(filter.begin(), filter.end(), positive);
    const auto end = std::find_if(filter.rbegin(), filter.rend(), positive).base();
    out.push_back(
        {begin - filter.begin(), begin < end ? std::vector(begin, end) : std::vector<double>()});
  }
  return out;
}

// Power spectra of frames, two at a time: one is the real, the other the imaginary part of what is
// transformed.
class Spectra {
 public:
  explicit Spectra(std::span<const float> samples)
      : samples_(samples), length_(clips_of(std::ssize(samples)) * kMelClip), fourier_(kMelWindow) {
    for (int64_t i = 0; i < kMelWindow; ++i)
      window_[i] = 0.5 - 0.5 * std::cos(2 * std::numbers::pi * static_cast<double>(i) /
                                        static_cast<double>(kMelWindow));
  }
  using Power = std::array<double, kMelBins>;
  void run(int64_t frame, Power& first, Power& second) {
    for (int64_t i = 0; i < kMelWindow; ++i)
      in_[i] = window_[i] * std::complex<double>(at(frame, i), at(frame + 1, i));
    fourier_.run(in_.data(), out_.data());
    for (int64_t k = 0; k < kMelBins; ++k) {
      const auto a = out_[k], b = std::conj(out_[(kMelWindow - k) % kMelWindow]);
      first[k] = std::norm(a + b) / 4;
      second[k] = std::norm(a - b) / 4;
    }
  }

 private:
  // Sample i of a frame, which is centred at its number of hops. Clips are mirrored at their ends.
  double at(int64_t frame, int64_t i) const {
    int64_t place = std::abs(frame * kMelHop + i - kMelWindow / 2);
    if (place >= length_) place = 2 * (length_ - 1) - place;
    return place < std::ssize(samples_) ? static_cast<double>(samples_[place]) : 0.0;
  }

  std::span<const float> samples_;
  int64_t length_;  // with the zeros behind
  media::Fourier fourier_;
  std::array<double, kMelWindow> window_;
  std::array<std::complex<double>, kMelWindow> in_, out_;
};

}  // namespace

std::vector<std::array<double, kMelBins>> mel_filters(int mels) {
  MEGATRON_ASSERT(mels > 0, "a number of filters");
  std::vector<double> edges;
  const double most = mel_of(kNyquist);
  for (int i = 0; i < mels + 2; ++i) edges.push_back(hertz_of(most * i / (mels + 1)));
  std::vector<std::array<double, kMelBins>> out(static_cast<size_t>(mels));
  for (size_t m = 0; m < out.size(); ++m) {
    for (int64_t k = 0; k < kMelBins; ++k) {
      const double hertz = kNyquist * static_cast<double>(k) / static_cast<double>(kMelBins - 1);
      const double rise = (hertz - edges[m]) / (edges[m + 1] - edges[m]);
      const double fall = (edges[m + 2] - hertz) / (edges[m + 2] - edges[m + 1]);
      out[m][k] = std::max(0.0, std::min(rise, fall)) * 2 / (edges[m + 2] - edges[m]);
    }
  }
  return out;
}

std::vector<float> log_mel(std::span<const float> samples, int mels) {
  MEGATRON_CHECK(!samples.empty(), "a sound without samples has no features");
  const int64_t frames = clips_of(std::ssize(samples)) * kClipFrames;
  const auto filters = sparse_filters(mels);
  // Frames behind the last that reaches a sample have no power.
  const int64_t reached =
      std::min(frames, (std::ssize(samples) + kMelWindow / 2 + kMelHop - 1) / kMelHop + 1);
  std::vector<float> out(static_cast<size_t>(mels * frames),
                         static_cast<float>(std::log10(kLeastPower)));
  Spectra spectra(samples);
  std::array<Spectra::Power, 2> power;
  for (int64_t frame = 0; frame < reached; frame += 2) {
    spectra.run(frame, power[0], power[1]);
    for (int64_t i = 0; i < 2 && frame + i < frames; ++i) {
      for (int m = 0; m < mels; ++m) {
        double sum = 0;
        for (size_t j = 0; j < filters[m].weights.size(); ++j)
          sum += filters[m].weights[j] * power[i][filters[m].first + j];
        out[m * frames + frame + i] = static_cast<float>(std::log10(std::max(sum, kLeastPower)));
      }
    }
  }
  const float least = *std::max_element(out.begin(), out.end()) - 8;
  for (float& x : out) x = (std::max(x, least) + 4) / 4;
  return out;
}

std::vector<float> frame_rows(std::span<const float> mel, int mels, int64_t frames) {
  const int64_t all = std::ssize(mel) / mels, clips = all / kClipFrames, rows = frames + 2;
  MEGATRON_ASSERT(frames <= kClipFrames, frames, " frames of a clip");
  std::vector<float> out(static_cast<size_t>(clips * rows * mels), 0.0F);
  for (int64_t clip = 0; clip < clips; ++clip)
    for (int64_t i = 1; i < rows && i <= kClipFrames; ++i)
      for (int m = 0; m < mels; ++m)
        out[(clip * rows + i) * mels + m] = mel[m * all + clip * kClipFrames + i - 1];
  return out;
}

int64_t mel_frames(int64_t samples) { return (samples + kMelHop - 1) / kMelHop; }

int64_t qwen2_audio_tokens(int64_t frames) {
  const int64_t halved = (frames - 1) / 2 + 1;  // by the second convolution
  return halved < 2 ? 0 : (halved - 2) / 2 + 1;
}

int64_t voxtral_tokens(int64_t samples) { return clips_of(samples) * 375; }

}  // namespace megatron
