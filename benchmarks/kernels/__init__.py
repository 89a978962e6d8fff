"""The layer of experts beside dense layers and everybody else's."""
