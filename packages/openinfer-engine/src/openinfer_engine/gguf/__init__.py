"""GGUF files, in which llama.cpp has weights, config and tokenizer, brought to a Hugging Face folder's terms."""
