"""Conversations as a model sees them: messages to tokens, and tokens to text and tool calls."""
