"""What a layout would cost: hardware, traffic, memory and time, as pure functions."""
