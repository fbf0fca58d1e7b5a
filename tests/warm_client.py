"""One command, run by the warm interpreter of warm_python.py: hands over arguments, folder,
environment and the three standard streams, and ends with the command's status.

Imports next to nothing, as it is started for each command.
"""

import array
import json
import os
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    command = {"argv": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}
    data = json.dumps(command).encode()
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    server.sendmsg([len(data).to_bytes(8, "big")], streams)
    server.sendall(data)
    status = server.recv(1)
sys.exit(status[0] if status else 70)
