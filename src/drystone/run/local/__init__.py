"""The local engine: training processes on this machine's devices, real or emulated."""
