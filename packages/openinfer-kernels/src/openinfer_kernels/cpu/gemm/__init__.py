"""Matrix products with plain and low-bit weights."""
