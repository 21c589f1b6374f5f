"""Model files in others' formats: config.json, safetensors, GGUF, tokenizers."""
