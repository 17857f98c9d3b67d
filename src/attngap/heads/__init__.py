"""The floor under both verbs: what a head reads, passages, replacements, damage, and the choice of heads."""
