"""What a run does about spikes of its loss: leave out their updates, and go back past their data."""
