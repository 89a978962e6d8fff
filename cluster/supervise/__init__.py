"""Supervises a job: places it, runs its generations, finds why they fail, and decides what follows."""
