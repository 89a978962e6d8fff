"""Supervises a job: places it, runs its generations, finds causes of failures, and decides what follows."""
