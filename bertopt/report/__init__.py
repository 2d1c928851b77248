"""What a run found, for people: `table` for the terminal and markdown, `html` for the page, `cells` their words."""
