"""What a node runs; a file in the node's `faults` folder makes it fail once."""

import os
import time
from pathlib import Path

from task import deployment

from simfbo.flower import client_app

app = client_app(deployment)


@app.lifespan()
def disturbed(context):
    """Fail as a file asks, and take the file away."""
    part = context.node_config["partition-id"]
    for file in Path(str(context.node_config["faults"])).glob(f"*-{part}"):
        kind = file.name.partition("-")[0]
        file.unlink()
        if kind == "raise":
            raise RuntimeError("broken on purpose")
        if kind == "die":
            os.kill(os.getpid(), 9)
        if kind == "sleep":
            time.sleep(context.run_config["timeout"] + 3)
    yield
