"""The tasks: one file each, generated from a seed, nothing to download."""
