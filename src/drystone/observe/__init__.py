"""What it meant: estimate against measurement, metrics, plots."""
