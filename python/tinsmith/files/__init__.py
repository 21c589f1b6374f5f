"""What is read from and written to disk: models, checkpoints, PEFT adapters, exports."""
