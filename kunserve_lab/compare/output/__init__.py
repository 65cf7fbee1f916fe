"""What a comparison shows: tables, figures, pages, a verdict in words."""
