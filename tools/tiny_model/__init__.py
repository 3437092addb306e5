"""Generate the text for the toy checkpoint, train it, and measure it (see README.md in this folder)."""
