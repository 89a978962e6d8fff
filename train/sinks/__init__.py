"""Where a run's metrics go: one log (log.py) that hands each line to several writers, one file each."""
