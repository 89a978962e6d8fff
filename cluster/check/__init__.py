"""Checks a machine or a cluster before a job starts: software, memory, ports, folders, ranks."""
