"""Layers of molflt: tensors in, tensors out."""
