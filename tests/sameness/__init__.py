"""The sameness matrix: small models of every kind, at every size, in every way to run them.

    python -m tests.sameness.matrix

Each cell is a whole training. Its record (every loss, every sample, the final state) is compared to
the bit with that of the same model on one rank. `cases` lists the rows and `ways` the columns.
"""
