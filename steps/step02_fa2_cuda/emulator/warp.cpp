// SPDX-License-Identifier: MIT
// What a warp does together: see warp.h.

namespace emulator {

template <class Half> static void multiply(MmaOffer** lanes) {
  float A[16][16], B[16][8];
  for (int t = 0; t < 32; t++) {
    int g = t / 4, c = 2 * (t % 4);
    for (int i = 0; i < 4; i++) {
      A[g + i % 2 * 8][c + i / 2 * 8] = low<Half>(lanes[t]->a[i]);
      A[g + i % 2 * 8][c + i / 2 * 8 + 1] = high<Half>(lanes[t]->a[i]);
    }
    B[c][g] = low<Half>(lanes[t]->b0);
    B[c + 1][g] = high<Half>(lanes[t]->b0);
    B[c + 8][g] = low<Half>(lanes[t]->b1);
    B[c + 9][g] = high<Half>(lanes[t]->b1);
  }
  for (int t = 0; t < 32; t++)
    for (int i = 0; i < 4; i++) {
      int row = t / 4 + i / 2 * 8, column = 2 * (t % 4) + i % 2;
      float sum = lanes[t]->d[i];
      for (int k = 0; k < 16; k++) sum += A[row][k] * B[k][column];
      lanes[t]->d[i] = sum;
    }
}

template <class Half> void mma_of_warp(MmaOffer& offer, Site site) {
  whole_warp("mma", offer, site, multiply<Half>);
}
template void mma_of_warp<bf16>(MmaOffer&, Site);
template void mma_of_warp<fp16>(MmaOffer&, Site);

struct MatrixOffer {
  uint32_t* r;
  char* row;
};

// The number [row][column] of matrix i.
static uint16_t& matrix(MatrixOffer** lanes, int i, int row, int column) {
  return reinterpret_cast<uint16_t*>(lanes[8 * i + row]->row)[column];
}

void ldmatrix(const char* operation, uint32_t (&r)[4], const void* row, bool transposed, Site site) {
  MatrixOffer offer{r, static_cast<char*>(const_cast<void*>(row))};
  whole_warp(operation, offer, site, [transposed](MatrixOffer** lanes) {
    for (int t = 0; t < 32; t++)
      for (int i = 0; i < 4; i++) {
        int g = t / 4, c = 2 * (t % 4);
        uint32_t low = transposed ? matrix(lanes, i, c, g) : matrix(lanes, i, g, c);
        uint32_t high = transposed ? matrix(lanes, i, c + 1, g) : matrix(lanes, i, g, c + 1);
        lanes[t]->r[i] = low | high << 16;
      }
  });
}

void stmatrix(const uint32_t (&r)[4], void* row, Site site) {
  MatrixOffer offer{const_cast<uint32_t*>(r), static_cast<char*>(row)};
  whole_warp("stmatrix_x4", offer, site, [](MatrixOffer** lanes) {
    for (int t = 0; t < 32; t++)
      for (int i = 0; i < 4; i++) {
        matrix(lanes, i, t / 4, 2 * (t % 4)) = uint16_t(lanes[t]->r[i]);
        matrix(lanes, i, t / 4, 2 * (t % 4) + 1) = uint16_t(lanes[t]->r[i] >> 16);
      }
  });
}

void poll(Site site) {
  int polls = current->polls + 1;
  if (polls > 100000)
    fail(site,
         "this thread polls for ever; blocks run one after the other, and none can wait for a later one");
  wait("a loop of atomicAdd", site, [] { return true; });
  current->polls = polls;
}

}  // namespace emulator
