"""Runs one model in many processes: in this machine's, on a Ray cluster, or under torchrun.

Every process is a rank. The ranks of a replica run the same steps; one of them, the driver, has the
engine: it plans each step and hands the plan to the others (distributed.py). A front starts all
ranks, spreads requests over the replicas, and ends everything as soon as one rank ends
(group.py).
"""
