"""Generates tasks whose answers need many steps of computation, and scores models on them.

Each task is a module. `train` and `held_out` yield records for the ordinary pipeline
(`prepare.input="python:moebius_science.tasks.p_hop:train?length=32"`), and `words` returns the
words of its tokenizer. satellites/science/docs/tasks.md describes what each measures.
"""
