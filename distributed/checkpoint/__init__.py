"""Saves and loads checkpoints under global names: any layout loads any other layout's."""
