"""Matrix products: our own kernels, cuBLASLt, low-bit weights, and which of them multiplies what."""
