"""Watches running ranks: their heartbeats, hangs, and the evidence about a hang."""
