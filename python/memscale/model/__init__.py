"""What a model is, before anything runs: its layers, its calls, its optimizer."""
