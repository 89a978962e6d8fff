"""Routes tokens on a simulated cluster: each rank is a thread, exchanges carry real values."""
