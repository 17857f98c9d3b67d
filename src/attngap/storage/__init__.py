"""Files: whole writes, locks, checkpoints of resumable work, and run records in SQLite."""
