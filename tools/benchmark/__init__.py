"""What `tools/bench.py` is made of.

lines, report    goals, verdicts, JSON and the one table
processes        whole processes that take turns, their seconds, memory and disk reads
caches, cgroup   the state of the page cache before a run, and a limit on it
models, setting  synthetic checkpoints made on demand, and what all groups share
commands, floors the programs that are timed
groups/          one module a group of lines: `measure(bench) -> list[Line]`
children/        scripts that run as processes of their own
"""
