"""GPU ranks: the backend, its memory budget, and workers whose steps are replayed from captured graphs."""
