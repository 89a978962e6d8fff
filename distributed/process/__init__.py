"""One rank's process: its groups and timeouts, agreement with its peers, diagnosis of what hangs."""
