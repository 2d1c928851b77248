"""What a run found, for people: `terminal` and `html` show it, `junit` and `markdown_summary` hand it to CI, in the words of `formatting`."""
