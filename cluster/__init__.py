"""Where and how often a run is started: jobs, Ray, one torchrun agent per node, watching."""
