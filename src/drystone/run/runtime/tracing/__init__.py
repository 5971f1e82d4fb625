"""The parts of `drystone.run.runtime.trace`."""
