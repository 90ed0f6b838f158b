"""Text for people: tables of estimates and plans, progress."""
