// Programmatic dependent launch, from Hopper on; before it, kernels never overlap and these do nothing. (hopper.cuh has
// the same for sources that are for Hopper alone.)
//
// A kernel launched with `overlap=True` may run while the one before it still does. It calls `wait_for_previous_kernel`
// before it touches anything that other kernels write or read; only what never changes (weights, tables) may be read
// earlier. As each kernel of the chain waits, the wait covers all earlier ones too.
#pragma once

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The PDL trigger: the next kernel may be started as soon as all blocks have called this or ended. Called before the
// wait, the next kernel has the time of both kernels ahead of it to move in; after it, its waiting blocks take no room
// from those.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
