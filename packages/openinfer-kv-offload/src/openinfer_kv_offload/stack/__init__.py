"""Several tiers as one, fastest first."""
