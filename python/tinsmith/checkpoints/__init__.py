"""Adapters on disk: checkpoints, PEFT's folders, exports, and the folder of all checkpoints."""
