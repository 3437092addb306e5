// Runs a kernel's blocks one after the other on the calling thread; a block's threads are fibers. For x86-64.
#pragma once
#include <functional>

#include "cuda.hpp"

asm(R"(
.text
.local switch_stacks
switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" __attribute__((visibility("hidden"))) void switch_stacks(void** from, void* to);

namespace emulated {

constexpr int kMostThreads = 512;
constexpr size_t kStackBytes = 1 << 17, kSavedRegisters = 6;
constexpr long kMostRounds = 3'000'000;  // of a block's threads; one that needs more is taken to wait for ever

inline void* scheduler_stack;
inline void* stacks[kMostThreads];
inline bool has_ended[kMostThreads];
inline std::function<void()> kernel;

inline void** own_stack;  // where the thread whose turn it is leaves its stack

inline void let_others_run() { switch_stacks(own_stack, scheduler_stack); }

inline void run_thread() {
  kernel();
  has_ended[threadIdx.x] = true;
  let_others_run();
  abort();
}

// False where threads wait for what never comes.
inline bool run_block(int threads) {
  static char* memory = static_cast<char*>(aligned_alloc(4096, kStackBytes * kMostThreads));
  for (auto& each : first_warps) each.barrier.arrived = 0;
  for (auto& each : first_barriers) each.arrived = 0;
  for (size_t i = 0; i < sizeof(raw); i += 2) raw[i] = 0xC0, raw[i + 1] = 0x7F;  // NaN
  for (int i = 0; i < threads; i++) {
    void** top = reinterpret_cast<void**>(memory + kStackBytes * (i + 1)) - 2;
    *top = reinterpret_cast<void*>(run_thread);
    memset(top - kSavedRegisters, 0, kSavedRegisters * sizeof(void*));
    stacks[i] = top - kSavedRegisters;
    has_ended[i] = false;
  }
  int running = threads;
  for (long round = 0; running > 0; round++) {
    if (round == kMostRounds) return false;
    running = 0;
    for (int i = 0; i < threads; i++) {
      if (has_ended[i]) continue;
      threadIdx = {i, 0, 0}, own_stack = &stacks[i];
      switch_stacks(&scheduler_stack, stacks[i]);
      running += !has_ended[i];
    }
  }
  return true;
}

enum Outcome { kDone, kNoSuchKernel, kOtherArguments, kStuck };

template <class Call>
Outcome run_grid(int blocks, int threads, Call call) {
  kernel = call;
  gridDim = {blocks, 1, 1}, blockDim = {threads, 1, 1};
  for (int i = 0; i < blocks; i++) {
    blockIdx = {i, 0, 0};
    if (!run_block(threads)) return kStuck;
  }
  return kDone;
}

template <class Arguments>
Outcome launch(void (*function)(Arguments), const void*, const void* given, size_t bytes, int blocks, int threads) {
  if (bytes != sizeof(Arguments)) return kOtherArguments;
  Arguments arguments;
  memcpy(static_cast<void*>(&arguments), given, bytes);
  return run_grid(blocks, threads, [&] { function(arguments); });
}

template <class Arguments>
Outcome launch(void (*function)(CUtensorMap, Arguments), const void* given_map, const void* given, size_t bytes,
               int blocks, int threads) {
  if (bytes != sizeof(Arguments)) return kOtherArguments;
  Arguments arguments;
  CUtensorMap map;
  memcpy(static_cast<void*>(&arguments), given, bytes);
  memcpy(&map, given_map, sizeof(map));
  return run_grid(blocks, threads, [&] { function(map, arguments); });
}

}  // namespace emulated
