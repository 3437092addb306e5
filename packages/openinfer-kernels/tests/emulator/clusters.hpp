// Clusters of blocks, after fibers.hpp: all blocks of one take turns on the calling thread, each with shared memory of its
// own. A copy from shared memory of another block, or into it, lands at once.
#pragma once
#include <vector>

#include "fibers.hpp"

namespace emulated {

constexpr int kMostBlocks = 8, kMostClusterThreads = 512, kSharedBytes = 227 * 1024;
constexpr long kMostClusterRounds = 50'000;

struct ClusterBlock {
  alignas(1024) uint8_t memory[kSharedBytes];
  Barrier barriers[kBarriers];
  Warp warps[kWarps];
};
struct ClusterThread {
  void* stack;
  Index block, thread;
  int rank;
  bool has_ended, has_arrived;
  uint64_t round;  // of the cluster's barrier, at which it arrived
};

inline ClusterBlock* cluster_blocks = new (std::align_val_t(1024)) ClusterBlock[kMostBlocks];
inline std::vector<ClusterThread> cluster_threads;
inline ClusterThread* cluster_thread;
inline int blocks_of_cluster, arrived_in_cluster, alive_in_cluster;
inline uint64_t cluster_rounds;

inline uint8_t* memory_of(int rank) { return cluster_blocks[rank].memory; }
inline uint8_t* shared_memory() { return memory_of(cluster_thread->rank); }

inline void end_cluster_round_if_complete() {
  if (arrived_in_cluster == 0 || arrived_in_cluster < alive_in_cluster) return;
  for (auto& each : cluster_threads) each.has_arrived = false;
  arrived_in_cluster = 0, cluster_rounds++;
}
inline void arrive_in_cluster() {
  cluster_thread->round = cluster_rounds, cluster_thread->has_arrived = true;
  arrived_in_cluster++;
  end_cluster_round_if_complete();
}

inline void run_cluster_thread() {
  kernel();
  cluster_thread->has_ended = true;
  if (cluster_thread->has_arrived) arrived_in_cluster--;
  alive_in_cluster--;
  end_cluster_round_if_complete();
  let_others_run();
  abort();
}

// False where threads wait for what never comes.
inline bool run_cluster(int first_block, int blocks, int threads) {
  static char* stacks_memory = static_cast<char*>(aligned_alloc(4096, kStackBytes * kMostClusterThreads * kMostBlocks));
  cluster_threads.assign(blocks * threads, {});
  blocks_of_cluster = blocks, alive_in_cluster = blocks * threads, arrived_in_cluster = 0;
  for (int rank = 0; rank < blocks; rank++) {
    ClusterBlock& block = cluster_blocks[rank];
    for (auto& each : block.warps) each.barrier.arrived = 0;
    for (auto& each : block.barriers) each.arrived = 0;
    for (size_t i = 0; i < kSharedBytes; i += 2) block.memory[i] = 0xC0, block.memory[i + 1] = 0x7F;  // NaN
    for (int i = 0; i < threads; i++) {
      const int at = rank * threads + i;
      void** top = reinterpret_cast<void**>(stacks_memory + kStackBytes * (at + 1)) - 2;
      *top = reinterpret_cast<void*>(run_cluster_thread);
      memset(top - kSavedRegisters, 0, kSavedRegisters * sizeof(void*));
      cluster_threads[at] = {top - kSavedRegisters, {first_block + rank, 0, 0}, {i, 0, 0}, rank, false, false, 0};
    }
  }
  for (long round = 0; alive_in_cluster > 0; round++) {
    if (round == kMostClusterRounds) return false;
    for (auto& each : cluster_threads) {
      if (each.has_ended) continue;
      cluster_thread = &each, threadIdx = each.thread, blockIdx = each.block;
      barriers = cluster_blocks[each.rank].barriers, warps = cluster_blocks[each.rank].warps, own_stack = &each.stack;
      switch_stacks(&scheduler_stack, each.stack);
    }
  }
  return true;
}

template <class Call>
Outcome run_clusters(int blocks, int cluster, int threads, Call call) {
  if (cluster > kMostBlocks || threads > kMostClusterThreads || blocks % cluster) return kOtherArguments;
  kernel = call;
  gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1};
  for (int i = 0; i < blocks; i += cluster)
    if (!run_cluster(i, cluster, threads)) return kStuck;
  return kDone;
}

}  // namespace emulated
