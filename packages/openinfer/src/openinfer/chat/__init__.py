"""A conversation on the terminal: the turns of it, and who answers."""
