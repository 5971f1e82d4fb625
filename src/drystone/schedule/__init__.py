"""What to do now: snapshot in, decisions out; no clock, no I/O, no randomness."""
