"""What comes of the lab's runs: means over seeds, tables, a summary, a page, the papers' claims."""
