"""RMSNorm, alone and around hyper-connections."""
