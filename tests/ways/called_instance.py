"""An instance's process that writes its calls: ``python -m tests.ways.called_instance FOLDER``."""

import os
import sys
from pathlib import Path

from kunserve.cluster.instance.start import run_instance
from kunserve_lab.world.fake_main import load_fake
from tests.ways.called import write_calls

if __name__ == "__main__":
    with Path(sys.argv[1], f"instance-{os.getpid()}").open("w", buffering=1) as target:
        write_calls(target)
        sys.exit(run_instance(load_fake))
