"""`tinsmith compare`: training methods side by side, on one's own data and one's own model."""
