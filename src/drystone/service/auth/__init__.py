"""Who asks and what they may do: tokens, sessions, teams, limits."""
