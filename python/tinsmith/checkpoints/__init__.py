"""Adapters on disk: checkpoints, PEFT's folders, exports, and the folder that has them all."""
