"""What was measured and corrects the formulas: profiles of devices, errors on record."""
