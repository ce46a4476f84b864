"""Data files of the package; see SOURCES.md beside this file."""
