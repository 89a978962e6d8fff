"""The commands `plan` and `simulate`."""
