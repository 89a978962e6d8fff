"""Families of published mixtures of experts: config.json and names of tensors, mapped both ways."""
