"""Products of quantised weights on Hopper, as in csrc/lowbit, and of quantised activations with them."""
