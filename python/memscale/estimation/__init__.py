"""What a step will take, and why it did not fit."""
