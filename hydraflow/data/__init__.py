"""Prompts and conversations: files in, tokens out."""
