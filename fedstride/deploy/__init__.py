"""The same run over a network, on Flower: `fedstride deploy local EXPERIMENT`, or server and clients on real machines.

The server side is the engine with another transport (`network.py`); a client is a `Node` (`node.py`), which answers one
request at a time and keeps its memory on its own disk. `wire.py` says what travels.
"""
