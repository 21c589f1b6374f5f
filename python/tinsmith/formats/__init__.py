"""Files of models as others write them: config.json, safetensors, GGUF, tokenizers."""
