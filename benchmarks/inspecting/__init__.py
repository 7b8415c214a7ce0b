"""What looking inside takes: of models, and of the page that shows it."""
