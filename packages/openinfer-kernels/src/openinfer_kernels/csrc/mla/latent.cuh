// What the kernels of latent attention share: the sizes of every published model.
#pragma once
#include "attention/attention.cuh"
#include "common/ampere.cuh"

namespace latent {

using ampere::commit_copies;
using ampere::copy_16;
using ampere::load_matrices;
using ampere::load_transposed;
using ampere::shared_address;
using ampere::wait_for_copies;
using attention::bf16;

constexpr int kLatent = 512;             // values of a latent
constexpr int kRope = 64;                // rotated values
constexpr int kEntry = kLatent + kRope;  // of one token in the cache
constexpr int kNope = 128;               // unrotated values of a head's query and key
constexpr int kHead = kNope + kRope;     // values of a head's query
constexpr int kValue = 128;              // values of a head's value
constexpr int kHeads = 16;               // query heads of an item: the rows of a tensor core tile
constexpr int kPad = 8;                  // values between vectors in shared memory, against bank conflicts
constexpr int kPartial =
    kHeads * (kLatent + 2);  // floats of a partial: sums [heads, 512], maxima, sums of exponentials

// Where the sums of an item, a (token, tile of 16 query heads), are.
struct Item {
  int first_worker;  // of its partials, if there are several
  int count;         // of partials; 1: all is in `whole`; 0: nothing was computed
};

}  // namespace latent
