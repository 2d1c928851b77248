"""Show reports: `terminal` and `html` to people, `junit` and `markdown_summary` to CI; `formatting` has their common wording."""
