"""Models of transformers and of plain torch, tiny, trained plain and by us."""
