"""Which idle block makes room: the contract of policies, the least recently used, and fairness between owners."""
