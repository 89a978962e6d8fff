"""A rank's process: groups and timeouts, agreement between ranks, diagnosis of hangs."""
