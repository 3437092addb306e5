"""Collectives of the ranks of one engine: threads, processes with sockets, GPUs with NCCL."""
