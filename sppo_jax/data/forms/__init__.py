"""The forms that files of documents have: one file a form."""
