// SPDX-License-Identifier: MIT
// What a warp does together: see warp.h.

#include <algorithm>

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

struct Turn {
  const int* number;
  int thread;     // the one that waits for the turn and passes it on
  int since;      // how many times the block had met at __syncthreads when it waited for the turn
  int added;      // the same when another thread last added
  bool passed_on;
};
static std::vector<Turn> turns;  // of this block, in their order
static bool added_without_turn;

void forget_turns() {
  turns.clear();
  added_without_turn = false;
}

void wait_for_turn(const int* number, Site site) {
  if (added_without_turn) fail(site, "this thread waits for a turn, and others have added already");
  if (turns.empty() || turns.back().number != number)
    turns.push_back({number, current->rank, block_meeting.generation, -1, false});
}

void add_in_turn(Site site) {
  if (turns.empty()) {  // most kernels have none
    added_without_turn = true;
    return;
  }
  auto knows = [](Turn& t) { return t.thread == current->rank || t.since != block_meeting.generation; };
  auto turn = std::find_if(turns.rbegin(), turns.rend(), knows);  // the last that this thread knows of
  if (turn == turns.rend() || turn->passed_on)
    fail(site, "this thread adds before its block has its turn, or after the turn was passed on");
  if (turn->thread != current->rank) turn->added = block_meeting.generation;
}

void pass_turn_on(const int* number, Site site) {
  auto has = [&](Turn& t) { return t.number == number && t.thread == current->rank && !t.passed_on; };
  auto turn = std::find_if(turns.rbegin(), turns.rend(), has);
  if (turn == turns.rend())
    fail(site, "this thread passes on a turn that it has not waited for by load_acquire");
  if (turn->added == block_meeting.generation)
    fail(site, "a turn is passed on, and others have added since the last __syncthreads");
  turn->passed_on = true;
}

}  // namespace emulator
