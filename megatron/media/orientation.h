// Turning and mirroring by EXIF's numbers.
#pragma once

#include "megatron/media/image.h"

namespace megatron {

// The image as it is meant to be seen. With the upper left corner called A, then clockwise B, D, C,
// a stored A B / C D becomes: 1 AB/CD, 2 BA/DC, 3 DC/BA, 4 CD/AB, 5 AC/BD, 6 CA/DB, 7 DB/CA,
// 8 BD/AC.
Image oriented(Image image, int orientation);

}  // namespace megatron
