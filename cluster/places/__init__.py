"""Places where jobs run beside a Ray cluster that others started."""
