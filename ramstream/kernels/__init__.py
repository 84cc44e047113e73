"""Fast loops over blocks of elements, as numba loops (`host`) and in torch operations (`torch`)."""
