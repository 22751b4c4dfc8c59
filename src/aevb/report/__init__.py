"""The report: results on disk become one page. Nothing is trained here."""
