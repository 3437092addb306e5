"""How every tier moves blocks: its queue of transfers, threads, circuit breaker and counters."""
