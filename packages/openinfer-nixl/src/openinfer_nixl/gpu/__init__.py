"""The tier `nixl-gpu`: blocks in memory of an engine's GPU, which its peers read from GPU to GPU."""
