"""Between token ids and text: the tokenizer, detokenizers, stop strings."""
