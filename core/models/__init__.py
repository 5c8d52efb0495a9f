"""Models without torch: where they are, their tokenizer, and the GGUF file format."""
