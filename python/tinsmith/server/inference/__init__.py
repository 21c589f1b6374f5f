"""OpenAI's and Anthropic's routes: conversations and texts in, text out."""
