"""Processes that are forked from one which has imported everything, instead of being started anew.

start     a node's hand: starts the template, orders agents from it, learns their exit codes
orders    what the two tell each other
template  the process that imports everything that agents and ranks need, and forks agents
spares    the ranks: forked by the agent before it has threads, given their numbers when all have met
"""
