"""Run a plan: two streaming passes, workers, and the order of durable steps that lets a killed run go on.

Nothing is imported here: a plan is made, and its first bytes asked for, before `merging` loads numba and zarr.
"""
