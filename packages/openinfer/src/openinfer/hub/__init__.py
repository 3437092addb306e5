"""Models by name: the Hugging Face cache first, then a download into it."""
