"""Trains in several processes that are forked of one: `python forked_processes.py CONFIG PROCESSES`.

They meet as those of a launcher do, by the same variables, but import everything only once, which is most of
what so short a training takes.
"""

import os
import signal
import socket
import sys
import traceback
import warnings

from molflt.config import load_config
from molflt.training import train

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)


def main(path: str, processes: int) -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    config = load_config(path, ["--training.devices", str(processes)])
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            os.environ["LOCAL_RANK"] = str(rank)
            try:
                train(config, progress=False)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            # The others would wait for it.
            for other in children:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
