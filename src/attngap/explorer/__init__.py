"""The page one plays with: the report's charts, live, served to this machine only."""
