"""The page in the browser: its files, and the documents that they ask for."""
