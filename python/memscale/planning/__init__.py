"""Plans, asked for without wrapping."""
