"""What `moebius doctor` finds out about a place before money is spent there."""
