"""The data server of a node: chunks are decoded once, and mapped by every rank of the node.

start     starts the server as a child of the node's first rank, and says where it is
client    what a rank asks it with, and what happens once it is gone
protocol  the messages between the two, and their sizes
server    the process: one thread per rank, one that reads
cache     the decoded chunks, their holders, and the account of bytes
shared    a decoded chunk as a file in memory
"""
