"""What is done to a live model: plans are made, followed and measured."""
