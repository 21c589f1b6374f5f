"""Files on disk: models, checkpoints, PEFT adapters, exports."""
