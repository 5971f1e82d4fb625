"""9. Your own script under Drystone: it is told its ranks and its folder, and reports its steps."""

import drystone
from serving import HERE, service

with service():
    job = drystone.submit(HERE / "job_module.yaml")
    print("state:", job.wait(300))
    told = job.details()
    print("steps:", told["step"], "of", told["num_steps"])
