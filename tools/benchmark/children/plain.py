"""The yardstick: sum the words of all inputs twice, write as many bytes as the output has, fsync.

python plain.py OUT INPUT... -- BASE...
"""

import os
import sys

import numpy as np

out, *paths = sys.argv[1:]
inputs, base = paths[: paths.index("--")], paths[paths.index("--") + 1 :]
total = np.uint64(0)
for _ in range(2):
    for path in inputs:
        data = np.memmap(path, np.uint8, "r")
        total += data[: len(data) // 8 * 8].view(np.uint64).sum()
os.mkdir(out)
for path in base:
    with open(os.path.join(out, os.path.basename(path)), "wb") as file:
        file.write(np.memmap(path, np.uint8, "r").data)
        file.flush()
        os.fsync(file.fileno())
print(total)
