"""The commands `headway reproduce` and `headway arena`."""
