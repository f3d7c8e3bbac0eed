"""Whether every worker computes right: steps are computed twice now and then, and compared in bits.

A part of a step is computed by two workers (with logical shards), or twice by each (without); what comes out has to be
the same to the last bit. Where it is not, a further computation tells who is wrong, if it can be told.
"""
