"""Recurrent states: the causal convolution and the gated delta rule."""
