"""Who may be served before another that waits, and for how long."""
