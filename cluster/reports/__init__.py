"""What the files of a run folder tell: reports for people and scripts, without Ray or torch."""
