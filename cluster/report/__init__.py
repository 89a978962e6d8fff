"""Reports what a run did: status, logs, histories and the summary."""
