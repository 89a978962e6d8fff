"""Going on in place when a rank of the generation has died: the other ranks keep their processes.

orders      what agents and ranks of a node tell each other about it, as files in memory
rounds      a rank's ear: hears of a round, and breaks off what the rank waits in
sharing     which rank's state lies where, and which step all of it can be had of; pure functions
snapshots   copies of the state in memory: a rank's own, and what nobody else has of another
rejoin      leaves the broken groups, meets the others and the replacement anew, takes back the state
"""
