"""Imported last by servers that fork: sets what they have imported apart for good.

A collection in a forked process would otherwise look at every object of torch's modules, and by
that copy the memory that it shares with the server.
"""

import gc

gc.collect()
gc.freeze()
