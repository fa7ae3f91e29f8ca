"""The terminal program: command line and Textual app."""
