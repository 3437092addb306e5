"""Where the ranks of an engine after the first run, how they are started there, and the links to them."""
