"""How calls are written: as Lark for constrained sampling, as values of a type, and what marks them in a text."""
