"""How fast, how large: one question per file, one harness for all of them. See NOTES.md."""
