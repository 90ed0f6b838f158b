"""How calls of a model, its saved tensors and its optimizer's steps reach us."""
