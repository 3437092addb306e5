"""Low-rank adapters (LoRA): folders in PEFT's layout, what the ranks hold of them, and their life in an engine."""
