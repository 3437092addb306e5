"""RMSNorm alone, gated, and around hyper-connections."""
