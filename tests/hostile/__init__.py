"""Faulty checkpoints: tiny generators, one a fault, each with what the error must say.

`build` is what they are made of. `one_file` and `whole_folder` hold what goes wrong by itself; what aims at the
reader is in `headers`, `places` (links, names, what is no file), `archives` (zip files and pickles), `adapters` and
`beside` (side files). `mutated` damages good files by rule, for `fuzz`.
"""

from hostile.build import INDEX, LFS, NAME, entry, good, index, shards, weight_file
from hostile.one_file import FILES
from hostile.whole_folder import FOLDERS

__all__ = ["FILES", "FOLDERS", "INDEX", "LFS", "NAME", "entry", "good", "index", "shards", "weight_file"]
