"""Multi-head latent attention: absorbed for few query tokens, expanded for many."""
