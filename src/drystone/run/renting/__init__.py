"""Nodes that are rented while the system runs: who is asked, what runs, what it costs, who pays."""
