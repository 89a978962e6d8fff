"""Makes up tasks whose answers need many steps of computation, and scores models on them.

Each task is a module: `train` and `held_out` give records, as an input of the ordinary pipeline does
(`prepare.input="python:moebius_science.tasks.p_hop:train?length=32"`), and `words` the words of its
tokenizer. science/docs/tasks.md describes what each measures.
"""
