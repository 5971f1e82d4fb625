"""The running system: the log, what follows from it, and what makes it true."""
