"""Write so many bytes into space that was allocated before, and have them on the disk.

python write.py OUT BYTES
"""

import os
import sys

CHUNK = 8 << 20

out, size = sys.argv[1], int(sys.argv[2])
data = memoryview(os.urandom(1 << 16) * (CHUNK >> 16))
os.mkdir(out)
fd = os.open(os.path.join(out, "data"), os.O_WRONLY | os.O_CREAT, 0o666)
os.posix_fallocate(fd, 0, size)
done = 0
while done < size:
    done += os.pwrite(fd, data[: size - done], done)
os.fsync(fd)
