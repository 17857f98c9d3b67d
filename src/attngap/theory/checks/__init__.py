"""One function for each numbered statement of docs/theory.md that tries to refute it."""
