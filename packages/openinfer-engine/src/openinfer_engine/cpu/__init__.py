"""CPU ranks: the backend and its worker, which computes a step when it is launched."""
