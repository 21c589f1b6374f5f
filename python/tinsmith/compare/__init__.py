"""`tinsmith compare`: training methods side by side, on your own data and your own model."""
