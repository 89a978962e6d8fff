"""Loss spikes: skip their updates, and roll back past their data."""
