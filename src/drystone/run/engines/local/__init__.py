"""The engine of one machine: its devices, and one agent process for each of its nodes."""
