"""Places where jobs run: simulated clusters that stay, KubeRay, Slurm."""
