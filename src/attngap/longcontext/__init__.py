"""Recall over long contexts: tasks made on the fly, for any causal model, at any length, with nothing to download."""
