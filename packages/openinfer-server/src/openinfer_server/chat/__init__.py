"""Conversations as prompts: turns, the chat template, the encoded and checked prompt."""
