"""The parts of a report, one a file: each takes what was read and gives sections, none when it has nothing to say."""
