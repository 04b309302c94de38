"""What the dashboard is made of: templates, one style sheet, one script."""
