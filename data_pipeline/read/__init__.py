"""Reads prepared folders: everything that a training step needs, and nothing that makes data."""
