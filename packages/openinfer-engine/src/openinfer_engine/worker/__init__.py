"""Workers, one per rank, and the runners that have them execute steps, in threads or in processes."""
