"""What is wanted and what there is: frozen, checked, no arithmetic."""
