"""Which code a job runs: it is recorded, and brought along to nodes that have another."""
