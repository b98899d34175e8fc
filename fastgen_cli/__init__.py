"""Command lines of FastGen. They parse, call the library and print; nothing else lives here."""
