"""Attention layers: dense, SwitchHead and MoMHA."""
