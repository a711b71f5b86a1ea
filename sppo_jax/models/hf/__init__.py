"""Hugging Face folders: which tensor is which parameter, read and written tensor by tensor."""
