"""Functions that the model may call: fields, checks, grammars."""
