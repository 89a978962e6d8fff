"""Named runs: functions that return a whole configuration."""
