"""Checks a cluster's machines and network for `moebius doctor`."""
