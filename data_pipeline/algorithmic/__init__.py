"""Made-up tasks whose answers need many steps of computation: what recurrence in depth is good for.

Each module is one task: `train` and `held_out` give records, as an input of the ordinary pipeline does
(`data.input="python:moebius.data_pipeline.algorithmic.p_hop:train?length=32"`), and `words` the
words that its tokenizer has. docs/tasks.md says what each measures.
"""
