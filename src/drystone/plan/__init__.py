"""The best ways to run one job."""
