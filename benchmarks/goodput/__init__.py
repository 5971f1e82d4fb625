"""The worlds of Sia and Pollux: measured steps, goodput, and scenarios of them."""
