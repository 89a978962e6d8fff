"""Supervises one job: places it, runs generation after generation, finds causes, decides."""
