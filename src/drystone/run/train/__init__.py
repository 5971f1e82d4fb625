"""What runs inside the training and tracing processes; the only place that imports torch."""
