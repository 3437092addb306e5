"""What the generating APIs have in common: fields, structured output, the plan of engine requests."""
