"""Connects to a Unix socket, ends, and leaves the connection to a child, which lends it to whoever connects to another socket.

`relay.py SOCKET MINE`. Whoever looks at the process that connected finds none any more.
"""

import os
import select
import socket
import sys

theirs = socket.socket(socket.AF_UNIX)
theirs.connect(sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
listener.listen(1)
if os.fork():
    os._exit(0)
os.setsid()
ours, _ = listener.accept()
ends = {theirs: ours, ours: theirs}
while True:
    for ready in select.select(list(ends), [], [])[0]:
        data = ready.recv(65536)
        if not data:
            os._exit(0)
        ends[ready].sendall(data)
