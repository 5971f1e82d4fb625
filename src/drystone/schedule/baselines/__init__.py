"""Other people's policies, as they run them: the opponents in comparisons."""
