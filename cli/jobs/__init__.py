"""The commands about jobs: submit, resume, status, watch, logs, stop, scale, cluster, doctor."""
